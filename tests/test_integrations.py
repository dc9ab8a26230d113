"""Lightning, Hugging Face Trainer and Accelerate, as they are installed: train, save, resume, and on another number of
ranks."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from training import same

import gradzip
from gradzip import Fixed

PACKAGES = {"lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate"}
STEPS, SAVED_AT, BATCH = 6, 3, 4
POLICY = Fixed("topk:ratio=0.05")  # holds back most of each gradient: without its residuals a run goes another way
MODEL_SEED, DATA_SEED = 3, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(MODEL_SEED)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - x.sum(1, keepdim=True)).square().mean()}


def samples(batches: int) -> list[torch.Tensor]:
    """As many as give each rank so many batches."""
    rng = torch.Generator().manual_seed(DATA_SEED)
    return list(torch.randn(batches * BATCH * dist.get_world_size(), 16, generator=rng))


def as_torchrun() -> None:
    """The variables that torchrun sets and that frameworks look for; the process group is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"GROUP_RANK": "0", "HF_HUB_OFFLINE": "1"}


# -- each framework trains the same net: from the start, or from a checkpoint ------------------------------------------


def with_lightning(folder: Path, resumes: bool, policy: Fixed | None = POLICY) -> tuple[gradzip.Handle, nn.Module]:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from gradzip.integrations.lightning import GradzipCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    callback, module = GradzipCallback(policy), Module()
    saver = ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1, auto_insert_metric_name=False)
    trainer = L.Trainer(
        max_epochs=STEPS // SAVED_AT,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[callback, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = torch.utils.data.DataLoader(samples(SAVED_AT), BATCH)  # type: ignore[arg-type]  # a list is one, too
    trainer.fit(module, data, ckpt_path=str(folder / f"{SAVED_AT}.ckpt") if resumes else None)
    assert callback.handle is not None
    return callback.handle, module


def with_transformers(folder: Path, resumes: bool, policy: Fixed | None = POLICY) -> tuple[gradzip.Handle, nn.Module]:
    from transformers import Trainer, TrainingArguments

    from gradzip.integrations.transformers import GradzipCallback

    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=SAVED_AT,
        per_device_train_batch_size=BATCH,
        learning_rate=0.01,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    model = Net()
    trainer = Trainer(model, arguments, train_dataset=[{"x": x} for x in samples(STEPS)])
    callback = GradzipCallback(trainer, policy)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if resumes else None)
    assert callback.handle is not None
    return callback.handle, model


def with_accelerate(folder: Path, resumes: bool, policy: Fixed | None = POLICY) -> tuple[gradzip.Handle, nn.Module]:
    from accelerate import Accelerator

    from gradzip.integrations.accelerate import attach

    accelerator, net = Accelerator(cpu=True), Net()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    data: Any = torch.utils.data.DataLoader(samples(STEPS), BATCH)  # type: ignore[arg-type]  # a list is one, too
    model, optimizer, data = accelerator.prepare(net, optimizer, data)
    handle = attach(accelerator, model, optimizer, policy)
    if resumes:
        accelerator.load_state(str(folder / "saved"))
    for number, x in enumerate(data):
        if resumes and number < SAVED_AT:
            continue
        optimizer.zero_grad()
        accelerator.backward(model(x)["loss"])
        optimizer.step()
        if number + 1 == SAVED_AT and not resumes:
            accelerator.save_state(str(folder / "saved"))
    handle.detach()
    accelerator.save_state(str(folder / "after"))
    assert not list((folder / "after").glob("gradzip*")), "a handle that is detached was saved"
    return handle, net


FRAMEWORKS: dict[str, Callable[[Path, bool, Fixed | None], tuple[gradzip.Handle, nn.Module]]] = {
    "lightning": with_lightning,
    "transformers": with_transformers,
    "accelerate": with_accelerate,
}


def trained(rank: int, framework: str, folder: str, resumes: bool, policy: Fixed | None = POLICY) -> dict[str, Any]:
    as_torchrun()
    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradzip")
    logger.addHandler(heard)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gradzip.GradzipWarning)
        handle, model = FRAMEWORKS[framework](Path(folder), resumes, policy)
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "steps": handle.stats()["steps"],
        "sent": handle.stats()["bytes_sent"],
        "options": {tensor["option"] for tensor in handle.stats()["tensors"].values()},
        "lines": [line for line in lines if "resumed" in line],
        "warned": [str(w.message) for w in caught if issubclass(w.category, gradzip.GradzipWarning)],
    }


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed (pip install 'gradzip[examples]')")
    return name


@pytest.fixture(scope="module")
def checkpoints(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(framework)


@pytest.fixture(scope="module")
def whole(framework: str, checkpoints: Path) -> list[dict[str, Any]]:
    """Two ranks train all steps, and save half way."""
    return run_ranks(2, trained, framework, str(checkpoints), False)


def replicas_agree(found: list[dict[str, Any]]) -> bool:
    return all(same(rank["parameters"], found[0]["parameters"]) for rank in found)


def test_gradients_are_compressed_and_replicas_agree(framework: str, whole: list[dict[str, Any]]) -> None:
    assert replicas_agree(whole)
    for rank in whole:
        assert rank["steps"] == STEPS
        assert 0 < rank["sent"] < STEPS * 4 * 1153 / 4, "the 1,153 parameters were not compressed"
        assert rank["warned"] == []


def test_a_resumed_run_is_bit_identical(framework: str, whole: list[dict[str, Any]], checkpoints: Path) -> None:
    resumed = run_ranks(2, trained, framework, str(checkpoints), True)
    for before, after in zip(whole, resumed):
        assert after["steps"] == STEPS
        assert after["lines"] == []
        assert same(after["parameters"], before["parameters"])


def test_a_checkpoint_of_two_ranks_is_resumed_by_three(
    framework: str, whole: list[dict[str, Any]], checkpoints: Path
) -> None:
    for file in checkpoints.glob("*/gradzip-1.pt"):  # Trainer's and Accelerate's; Lightning has one file for all ranks
        file.unlink()
    resumed = run_ranks(3, trained, framework, str(checkpoints), True)
    assert replicas_agree(resumed)
    assert [rank["steps"] - SAVED_AT > 0 for rank in resumed] == [True] * 3
    without = "rank 2, which starts" if framework == "lightning" else "ranks 1 to 2, which start"
    (line,) = resumed[0]["lines"]
    assert line == (
        f"resumed at step {SAVED_AT} on 3 ranks; the state was saved by 2; "
        f"no state was saved for {without} with empty residuals"
    )
    assert [rank["lines"] for rank in resumed[1:]] == [[], []]
    assert all(rank["warned"] == [] for rank in resumed)


def test_without_a_codec_the_default_follows_the_optimizer(framework: str, tmp_path: Path) -> None:
    """SGD in Lightning and Accelerate, AdamW in Trainer."""
    whole = run_ranks(2, trained, framework, str(tmp_path), False, None)
    assert replicas_agree(whole)
    assert [rank["options"] for rank in whole] == [{"noise"}] * 2
    resumed = run_ranks(2, trained, framework, str(tmp_path), True, None)
    assert same(resumed[0]["parameters"], whole[0]["parameters"])


def two_models(rank: int, folder: str) -> list[int]:
    from accelerate import Accelerator

    from gradzip.integrations.accelerate import attach

    as_torchrun()
    accelerator = Accelerator(cpu=True)
    models = [accelerator.prepare(Net()) for _ in range(2)]
    policies: list[Any] = [POLICY, "identity"]
    handles = [attach(accelerator, model, policy=policy) for model, policy in zip(models, policies)]
    for model in (models[0], models[1], models[1]):
        accelerator.backward(model(torch.ones(BATCH, 16))["loss"])
    accelerator.save_state(folder)
    for model in models:
        accelerator.backward(model(torch.ones(BATCH, 16))["loss"])
    accelerator.load_state(folder)
    return [handle.stats()["steps"] for handle in handles]


def test_accelerate_keeps_the_states_of_two_models_apart(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(2, two_models, str(tmp_path)) == [[1, 2], [1, 2]]
    found = sorted(path.name for path in tmp_path.glob("gradzip*"))
    assert found == ["gradzip-0.pt", "gradzip-1.pt", "gradzip_1-0.pt", "gradzip_1-1.pt"]


def resumed_from(rank: int, folder: str) -> list[str]:
    """Where the Trainer's callback looks for its files."""
    from gradzip.integrations.transformers import GradzipCallback

    state, there = SimpleNamespace(global_step=7), Path(folder)
    found = []
    for checkpoint, resumed in ((None, None), (None, str(there)), (None, "true"), ("/given", str(there))):
        args = SimpleNamespace(output_dir="out", resume_from_checkpoint=resumed)
        found.append(str(GradzipCallback(None, checkpoint=checkpoint)._resumed_from(args, state)))
    return found


def test_where_trainer_resumes_from(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (pip install 'gradzip[examples]')")
    assert run_ranks(1, resumed_from, str(tmp_path)) == [
        ["out/checkpoint-7", str(tmp_path), "out/checkpoint-7", "/given"]
    ]


# -- what cannot work --------------------------------------------------------------------------------------------------


def refused(rank: int, name: str) -> str:
    """What a callback says of a Trainer that has no DistributedDataParallel model."""
    callbacks = importlib.import_module(f"gradzip.integrations.{name}")
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=Net()), model_wrapped=Net())
    if name == "lightning":
        begin = partial(callbacks.GradzipCallback().on_train_start, trainer, None)
    else:
        begin = partial(callbacks.GradzipCallback(trainer).on_train_begin, None, None, None)
    with pytest.raises(gradzip.Unsupported) as caught:
        begin()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [("lightning", "works with strategy='ddp' on two or more devices"), ("transformers", "start two or more ranks")],
)
def test_a_trainer_without_ddp_is_refused(name: str, words: str) -> None:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed (pip install 'gradzip[examples]')")
    (said,) = run_ranks(1, refused, name)
    assert words in said


def composable(rank: int) -> list[str]:
    from torch.distributed._composable import replicate_with_fsdp
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("replicate",))
    said = []
    models: list[Any] = [replicate(Net()), replicate_with_fsdp.replicate(Net(), mesh=mesh)]
    for model in models:
        with pytest.raises(gradzip.Unsupported) as caught:
            gradzip.attach(model)
        said.append(str(caught.value))
    return said


def test_composable_replicate_is_refused_with_what_works() -> None:
    pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    ((with_ddp, with_fsdp),) = run_ranks(1, composable)
    for said in (with_ddp, with_fsdp):
        assert "that replicate() of torch.distributed._composable has changed" in said
        assert said.endswith("Write attach(DistributedDataParallel(model), optimizer) instead of replicate(model)")


# -- Lightning Fabric --------------------------------------------------------------------------------------------------


def with_fabric(rank: int, compiles: bool) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    as_torchrun()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    fabric.launch()
    net: Any = torch.compile(Net(), backend="eager") if compiles else Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    handle = gradzip.attach(model, optimizer, "gcomp:keep=7")
    for x in torch.stack(samples(2)).view(2, 2, BATCH, 16)[:, rank]:
        optimizer.zero_grad()
        fabric.backward(model(x)["loss"])
        optimizer.step()
    stats = handle.stats()
    return {"steps": stats["steps"], "sent": stats["bytes_sent"], "parameters": [p.detach() for p in net.parameters()]}


@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
def test_fabric_needs_no_callback(compiles: bool) -> None:
    pytest.importorskip("lightning.fabric")
    found = run_ranks(2, with_fabric, compiles)
    assert replicas_agree(found)
    assert all(rank["steps"] == 2 and rank["sent"] > 0 for rank in found)


# -- imports -----------------------------------------------------------------------------------------------------------


def test_importing_gradzip_imports_no_framework() -> None:
    code = f"import sys, gradzip.integrations; sys.exit(bool(set(sys.modules) & {set(PACKAGES.values())}))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": _source()}).returncode == 0


def _source() -> str:
    return os.pathsep.join(filter(None, [str(Path(gradzip.__file__).parents[1]), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_its_cure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (PACKAGES[name], f"{PACKAGES[name]}.pytorch"):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, f"gradzip.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"gradzip.integrations.{name} needs .*: pip install .*{PACKAGES[name]}"):
        importlib.import_module(f"gradzip.integrations.{name}")
