"""Hugging Face Trainer: `trainer.add_callback(GradzipCallback(trainer))`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..codecs import Codec
from ..errors import Unsupported
from ..hooks import Handle, attach
from ..option import Option
from ..policy import Policy
from . import files

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "gradzip.integrations.transformers needs Hugging Face Transformers: pip install 'transformers[torch]'"
    ) from error

__all__ = ["GradzipCallback"]


class GradzipCallback(transformers.TrainerCallback):
    """Compresses gradients while `trainer.train` runs, and keeps every rank's state in the Trainer's checkpoints.

    It needs the Trainer itself, because callbacks are handed the model without its DistributedDataParallel wrapper.
    `policy` and `settings` are those of `gradzip.attach`. `checkpoint` is the folder to resume from; by default it is
    `args.resume_from_checkpoint`, or the folder of the resumed step in `args.output_dir`. `handle` is the Handle from
    the start of training on.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        policy: str | Codec | Option | Policy | None = None,
        *,
        checkpoint: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.trainer, self.policy, self.checkpoint, self.settings = trainer, policy, checkpoint, settings
        self.handle: Handle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model = self.trainer.model_wrapped
        if not _is_ddp(model):
            raise Unsupported(
                f"GradzipCallback works with DistributedDataParallel, and this Trainer's model is a "
                f"{type(model).__name__}: start two or more ranks with torchrun, without FSDP and DeepSpeed"
            )
        settings = {"scaler": self.trainer.accelerator.scaler} | self.settings
        self.handle = attach(model, self.trainer.optimizer, self.policy, **settings)
        if state.global_step:
            files.load(self.handle, self._resumed_from(args, state))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.handle is not None and not args.save_only_model:
            files.save(self.handle, _folder(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.handle is not None:
            self.handle.detach()

    def _resumed_from(self, args: Any, state: Any) -> Path:
        """The folder of the checkpoint; Trainer tells callbacks the step alone."""
        if self.checkpoint is not None:
            return Path(self.checkpoint)
        given = args.resume_from_checkpoint  # scripts pass it on to train(); it may also be "true"
        return Path(str(given)) if given and Path(str(given)).is_dir() else _folder(args, state)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _is_ddp(model: Any) -> bool:
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)
