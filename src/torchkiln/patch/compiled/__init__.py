"""The backend of ``torch.compile``: ops of torchkiln in the graphs that Dynamo records."""
