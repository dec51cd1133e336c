"""The callback for Hugging Face's Trainer, and the plug-in for axolotl."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchkiln import hub
from torchkiln.patch import Report

transformers = pytest.importorskip("transformers")
trainer_callback = pytest.importorskip("transformers.trainer_callback")


def llama() -> Any:
    """A Llama with one layer of 32 features."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def is_replaced(model: Any) -> bool:
    """Whether the model's norms run torchkiln's forward."""
    return type(model.model.norm).__name__ == "KilnLlamaRMSNorm"


def handler(callback: Any, model: nn.Module) -> Any:
    """The object with which transformers calls the callback."""
    return trainer_callback.CallbackHandler([callback], model, None, None, None)


def run(caller: Any, *events: str) -> None:
    """Calls the callback's methods for these events."""
    for event in events:
        getattr(caller, event)(
            SimpleNamespace(), trainer_callback.TrainerState(), trainer_callback.TrainerControl()
        )


def test_callback_replaces_once() -> None:
    model, callback = llama(), hub.trainer_callback(skip=["*.mlp"])
    caller = handler(callback, model)
    run(caller, "on_init_end")
    assert is_replaced(model)
    report = callback.report
    assert report is not None
    assert report["model.layers.0.mlp"].reason == "skip"
    run(caller, "on_train_begin", "on_step_end", "on_train_end")
    assert callback.report is report
    caller.model = llama()  # a hyperparameter search's next model
    run(caller, "on_train_begin")
    assert is_replaced(caller.model)


def test_callback_refuses_a_sharded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = hub.trainer_callback()
    monkeypatch.setattr("torchkiln.hub.transformers.FSDPModule", transformers.LlamaForCausalLM)
    with pytest.raises(RuntimeError, match=r"got a model that FSDP.*callback to the Trainer"):
        run(handler(callback, llama()), "on_train_begin")
    assert callback.report is None


def test_callback_knows_its_model_in_a_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of training the model may be wrapped by FSDP; it is not replaced again."""
    model, callback = llama(), hub.trainer_callback()
    caller = handler(callback, model)
    run(caller, "on_init_end")
    report = callback.report
    monkeypatch.setattr("torchkiln.hub.transformers.FullyShardedDataParallel", nn.Sequential)
    caller.model = nn.Sequential(model)
    run(caller, "on_train_begin")
    assert callback.report is report


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Eight sequences of 12 tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(index, index + 12)
        return {"input_ids": tokens, "labels": tokens}


def test_trainer(tmp_path: Path) -> None:
    """Losses and saved files of a training with the callback equal those without it."""
    pytest.importorskip("accelerate", reason="transformers.Trainer requires accelerate")
    losses: list[list[float]] = []
    models: list[Any] = []
    for callbacks in ([], [hub.trainer_callback()]):
        model = llama()
        options = transformers.TrainingArguments(
            str(tmp_path / str(len(models))),
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = transformers.Trainer(
            model, options, train_dataset=Sentences(), callbacks=callbacks
        )
        assert is_replaced(model) == bool(callbacks)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        trainer.save_model()
        models.append(transformers.AutoModelForCausalLM.from_pretrained(options.output_dir))
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for was, now in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(now, was, rtol=1e-4, atol=1e-5)
    assert not is_replaced(models[1])


@pytest.fixture(params=["axolotl", "stand-in"])
def plugin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plug-in as axolotl loads it; without axolotl, on a stand-in for its base class."""
    pytest.importorskip("pydantic", reason="axolotl requires pydantic")
    name = "torchkiln.hub.axolotl"
    if request.param == "axolotl":
        base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
        sys.modules.pop(name, None)
        yield base.load_plugin(f"{name}.ReplacePlugin")
    else:
        for path in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
        sys.modules["axolotl.integrations.base"].BasePlugin = object  # type: ignore[attr-defined]
        sys.modules.pop(name, None)
        yield __import__(name, fromlist=["ReplacePlugin"]).ReplacePlugin()
    sys.modules.pop(name, None)


@pytest.mark.parametrize("options", [None, {"skip": ["*.mlp"]}])
def test_axolotl(plugin: Any, options: dict[str, Any] | None) -> None:
    path, _, name = plugin.get_input_args().rpartition(".")
    arguments = getattr(sys.modules[path], name)
    given = arguments(torchkiln_replace=options) if options else arguments()
    model = llama()
    plugin.post_model_load(given, model)
    assert is_replaced(model)
    skipped = "skip" if options else ""
    assert plugin.report["model.layers.0.mlp"].reason == skipped
    assert isinstance(plugin.report, Report)


def test_axolotl_calls_the_plug_in() -> None:
    """Axolotl's manager loads the plug-in, merges its keys into the configuration and calls it."""
    base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
    manager = base.PluginManager.get_instance()
    path = "torchkiln.hub.axolotl.ReplacePlugin"
    manager.register(path)
    try:
        assert "torchkiln.hub.axolotl.ReplaceArguments" in manager.get_input_args()
        model = llama()
        manager.post_model_load(SimpleNamespace(torchkiln_replace=None), model)
        assert is_replaced(model)
    finally:
        del manager.plugins[path]
