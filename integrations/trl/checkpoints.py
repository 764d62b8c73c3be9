"""Which checkpoint a run can go on from: a kill in the middle of saving leaves a folder that looks like one."""

import json
from pathlib import Path

from accelerate.logging import get_logger
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

logger = get_logger(__name__)


def finished_checkpoint(wanted: str | bool, output_dir: str) -> str:
    """
    The checkpoint to resume from: `wanted`, or with `True` the last finished one in `output_dir`.

    Raises:
        `ValueError`: if it was not written to its end, naming one that was.
    """
    checkpoints = sort_checkpoints(output_dir)
    finished = [path for path in checkpoints if is_finished(path)]
    last = finished[-1] if finished else None
    if wanted is True:
        if last is None:
            what = (
                f"{len(checkpoints)} checkpoints, and none was written to its end" if checkpoints else "no checkpoint"
            )
            raise ValueError(f"{output_dir} holds {what}: start without resume_from_checkpoint.")
        for path in checkpoints[checkpoints.index(last) + 1 :]:
            logger.warning(f"{path} was not written to its end: resuming from {last}.")
        return last
    wanted = str(wanted)
    if Path(wanted).is_dir() and not is_finished(wanted):
        instead = f"resume from {last}" if last else "start without resume_from_checkpoint"
        raise ValueError(f"{wanted} was not written to its end, or is no checkpoint: {instead}.")
    return wanted


def is_finished(checkpoint: str | Path) -> bool:
    """The trainer's state is what is written last (`LongStrawGRPOTrainer._save_rng_state`)."""
    try:
        return "global_step" in json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
