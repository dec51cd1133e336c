pytest_plugins = ["torchkiln.testing.plugin"]
