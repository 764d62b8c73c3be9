"""GRPOTrainer whose log-probs come from packed prompt groups.

What it overrides: the log-prob method (policy, old policy and reference go through it), the shuffle of a generation
batch (by group instead of by row), the setter of `ref_model` (the parent builds and wraps the reference model in its
own constructor, and it must be attached in between), the cache that generation starts from, which checkpoint to resume
from, and what is measured. Rewards, advantages, losses, generation, saving and logging are the parent's.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator
from trl.trainer.utils import get_config_model_id, split_tensor_dict

from longstraw_dist import attach, rollout
from longstraw_dist.attach import attachment_of, is_attached
from longstraw_dist.attachment import Attachment
from longstraw_dist.groups import PromptGroup, find_groups
from longstraw_dist.meter import Phases, peak_bytes
from longstraw_dist.stand_ins import replaced

from .captures import INCOMPATIBLE, Captures
from .checkpoints import finished_checkpoint
from .config import LongStrawGRPOConfig
from .refusals import refuse_apart, refuse_inexact
from .rows import equal_where_same, pad_rows, shuffle_groups

logger = get_logger(__name__)
COUNTED = ("all_gather", "reduce_scatter", "all_reduce")  # collectives that are logged, of forward and backward


class LongStrawGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that runs each group's prompt once. The objective is the parent's; with `prompt_grad="exact"`
    so is the gradient.

    Costs a micro-batch: one forward of each distinct prompt and each completion, at most one more of each in backward,
    and one backward; with ZeRO-3 and FSDP2 two gathers and one reduce-scatter a layer. A group is shared as far as its
    rows lie in one micro-batch on one rank: choose `per_device_train_batch_size` as a multiple of `num_generations`.

    Args:
        model, reward_funcs, args, ...: as for [`~trl.GRPOTrainer`], with `args` a [`LongStrawGRPOConfig`].

    Raises:
        `ValueError`: at construction, for an option under which the result could not be the parent's, naming it.
    """

    args: Any  # a LongStrawGRPOConfig; the parent's types are narrower than its values
    model: Any
    _buffered_inputs: Any

    def __init__(
        self,
        model: "str | PreTrainedModel",
        reward_funcs: Any = None,
        args: LongStrawGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = LongStrawGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        refuse_inexact(args, processing_class, train_dataset, eval_dataset, kwargs)
        if processing_class is None:
            processing_class = tokenizer_of(model, args)
        self.phases = Phases()
        self._step_ended = True  # the next micro-batch is the first of an optimizer step
        self._reference: Attachment | None = None
        self.captures = Captures(args.capture_max_age)
        self._drift_seen_at = -1  # optimizer step
        self._turns = 0  # of the rollout so far
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        if (text := self._inner_text_config) is not None:  # the parent looks beside it, having got a tokenizer
            self.model.config.max_position_embeddings = text.max_position_embeddings
        if not is_attached(self.model):
            attach(self.model, args.longstraw())
        self._attachment = attachment_of(self.model)
        if self._attachment.config != args.longstraw():
            raise ValueError(
                f"the model is attached with {self._attachment.config}, which args differ from: pass it as it is "
                "before attach(), or with the same settings."
            )
        if args.cast_lm_head_to_fp32:
            for attachment in filter(None, (self._attachment, self._reference)):
                keep_out_of_autocast(attachment.blueprint.head)
        fault = self._find_fault_of_rollout()
        if args.rollout_from_capture and fault is not None:
            raise ValueError(f"rollout_from_capture=True, but {fault} Leave it out, or set it to False.")
        self.rollout_from_capture = args.rollout_from_capture is not False and fault is None
        if args.rollout_from_capture is None and fault is not None:
            logger.info(f"each completion runs its prompt in the rollout: {fault}")
        rows, generations = args.per_device_train_batch_size, self.num_generations
        if generations and rows % generations:
            logger.warning(
                f"per_device_train_batch_size={rows} is not a multiple of num_generations={generations}: groups are "
                "cut, and a prompt runs once in each part. The result is the same."
            )
        exact, layers = self._attachment.exact_layers, len(self._attachment.blueprint.layers)
        log = logger.info if exact == layers else logger.warning
        log(f"prompt_grad={args.prompt_grad}: the prompt's gradient is exact in {exact} of {layers} layers")

    @property
    def ref_model(self):
        return self._ref_model

    @ref_model.setter
    def ref_model(self, model):
        if isinstance(model, PreTrainedModel) and not is_attached(model):
            self._reference = attachment_of(attach(model, self.args.longstraw()))
        self._ref_model = model

    @property
    def _inner_text_config(self) -> Any:
        """Of a model of text and images; of one of text alone `None`."""
        text = self.model.config.get_text_config()
        return None if text is self.model.config else text

    def create_accelerator_and_postprocess(self):
        if self._inner_text_config is not None and self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = True  # as the parent does: what reads images has no gradient
        super().create_accelerator_and_postprocess()
        refuse_apart(self.accelerator.num_processes, self.accelerator.distributed_type)
        if not self.is_fsdp_enabled:
            return
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise ValueError("FSDP1 is not supported: set fsdp_version: 2 in the accelerate config.")
        if plugin.activation_checkpointing:
            raise ValueError(
                "fsdp_activation_checkpointing wraps the layers in modules of its own: set it to false. A layer is "
                "recomputed segment by segment anyway."
            )
        policy = plugin.mixed_precision_policy
        if policy is not None and policy.output_dtype not in (None, torch.float32):
            plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)  # log-probs stay float32

    @profiling_decorator
    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute log-probs, (optionally) entropies, zero on padding, and (optionally) the MoE auxiliary loss."""
        if given := [name for name, value in multimodal.items() if value is not None]:  # from a stream without columns
            raise ValueError(f"image inputs are not supported: the data set gave {given[0]}.")
        logps: list[Tensor] = []
        entropies: list[Tensor] = []
        aux_losses: list[Tensor] = []
        batch_size = batch_size or len(input_ids)
        with self.phases("forward" if torch.is_grad_enabled() else "score"):
            for begin in range(0, len(input_ids), batch_size):
                batch = slice(begin, begin + batch_size)
                groups, order = find_groups(input_ids[batch], attention_mask[batch], logits_to_keep)
                with self.accelerator.autocast():
                    out = self._run_groups(model, groups, compute_aux_loss)
                logps.append(pad_rows(out.logps, order, logits_to_keep) + out.anchor)
                if compute_entropy:
                    values = out.entropies
                    if self.top_entropy_quantile < 1.0:
                        values = equal_where_same(values, groups)
                    entropies.append(pad_rows(values, order, logits_to_keep))
                if compute_aux_loss:
                    aux_losses.append(out.aux_loss)
        aux_loss = torch.stack(aux_losses).mean() if compute_aux_loss else None
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, aux_loss

    def _run_groups(self, model, groups: list[PromptGroup], compute_aux_loss: bool):
        """One packed call, from the captured prompts where they are the policy's, and of now or not too old."""
        call = functools.partial(model, temperature=self.temperature)
        step = self.state.global_step
        if model is self.ref_model or compute_aux_loss or not self.model.training:  # a capture has no router logits
            return call(prompt_groups=groups, output_router_logits=compute_aux_loss)
        now = self._attachment.stands_on(parameters=False)
        given = self.captures.given_to(groups, now, step)
        if torch.is_grad_enabled() and self.captures.age(step) and self._drift_seen_at != step:
            self._drift_seen_at = step
            given = self._watch_drift(call, given)
        recapture = torch.is_grad_enabled() and self.args.capture_max_age > 0
        out = call(prompt_groups=given, capture=recapture, output_router_logits=False)
        if recapture:
            self.captures.add(out.captures, step)
        return out

    def _watch_drift(self, call, groups: list[PromptGroup]) -> list[PromptGroup]:
        """
        How far the log-probs of one response a rank, with its prompt's old capture, are from those with a new one:
        their mean difference, and the largest of all ranks. Beyond the bound no old capture is used any more, on any
        rank. Every rank makes the calls, whatever it holds.

        Returns:
            The groups, of which the one that was watched has the new capture.
        """
        with_old = [i for i, g in enumerate(groups) if g.capture is not None and any(map(len, g.response_ids))]
        watched = with_old[self.state.global_step % len(with_old)] if with_old else None
        old_groups: list[PromptGroup] = []
        if watched is not None:
            response = next(ids for ids in groups[watched].response_ids if len(ids))
            old_groups = [dataclasses.replace(groups[watched], response_ids=[response])]
        new_groups = [dataclasses.replace(group, capture=None) for group in old_groups]
        with torch.no_grad():
            old, new = call(prompt_groups=old_groups), call(prompt_groups=new_groups, capture=True)
        own = (old.logps[0] - new.logps[0]).abs().mean() if old_groups else old.scores.new_full((), -1.0)
        drift = self.accelerator.gather(own).max().item()
        if drift == -1.0:  # nothing of this micro-batch was captured, on no rank
            return groups
        self._metrics["train"]["longstraw/capture_drift"].append(drift)
        if not drift <= self.args.capture_max_drift:
            self.captures.drop()
            groups = [dataclasses.replace(group, capture=None) for group in groups]
        if watched is not None:
            groups[watched] = dataclasses.replace(groups[watched], capture=new.captures[0])
        return groups

    def _find_fault_of_rollout(self) -> str | None:
        """Why completions cannot be sampled from the state of a prompt that ran once, or `None`."""
        if self.use_vllm or self.use_transformers_continuous_batching or self.rollout_func is not None:
            return "the completions do not come from `generate` in this process."
        for name in INCOMPATIBLE:
            settings = (self.generation_kwargs, self._attachment.model.generation_config.to_dict())
            value = next((v for v in (s.get(name) for s in settings) if v is not None), None)
            if value not in (None, 1, True):
                return f"{name}={value!r} is set."
        return rollout.find_fault(self._attachment.model)

    def _generate(self, prompts: list):
        self._turns = 0
        return super()._generate(prompts)

    @profiling_decorator
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self._turns += 1
        # Every rank takes the first turn; how many follow, for its tools, is each one's own.
        if self._turns > 1 or not self.rollout_from_capture or self._find_fault_of_rollout() is not None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        model = self.accelerator.unwrap_model(self.model_wrapped)
        with replaced(model, "generate", functools.partial(self._generate_from_captures, model, model.generate)):
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _generate_from_captures(self, model, generate, input_ids: Tensor, attention_mask: Tensor, **kwargs) -> Tensor:
        """The model's own `generate`, which finds the prompts in its cache."""
        groups, order = find_groups(input_ids, attention_mask, 0)
        prompts = [PromptGroup(group.prompt_ids, []) for group in groups]
        with self.accelerator.autocast():
            captures = model(prompt_groups=prompts, capture=True).captures
        if self.model.training and self.args.offload is None:
            self.captures.add(captures, self.state.global_step)
        if max(len(prompt.prompt_ids) for prompt in prompts) > 1:
            numbers = [i for i, group in enumerate(groups) for _ in group.response_ids]
            place = {row: number for (row, _), number in zip(order, numbers, strict=True)}
            rows = [place[row] for row in range(len(input_ids))]
            with self.accelerator.autocast():
                kwargs["cache"] = rollout.filled_cache(self._attachment.model, captures, rows, input_ids.shape[1])
        del captures  # their hidden states, if nothing keeps them
        return generate(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As the parent's. `resume_from_checkpoint=True` takes the last checkpoint that was written to its end."""
        self.captures.drop()  # steps are counted anew
        if resume_from_checkpoint:
            resume_from_checkpoint = finished_checkpoint(resume_from_checkpoint, self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model, trial):
        # The state of a checkpoint that is written over, of a run before, would mark it as finished from the start.
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir):
        # The last file of each process. The parent then writes the trainer's state, which so marks a finished
        # checkpoint, and deletes older ones.
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    @profiling_decorator
    def _prepare_inputs(self, generation_batch):
        # The parent's method, with a shuffle that keeps the rows of a group together.
        with self.phases("rollout"):
            if not self.model.training:
                return self._generate_and_score_completions(generation_batch)
            if (
                self._step % (self.args.steps_per_generation * self.num_iterations) == 0
                or self._buffered_inputs is None
            ):
                self.captures.drop()
                batch = self._generate_and_score_completions(generation_batch)
                batch = shuffle_groups(batch)
                self._buffered_inputs = split_tensor_dict(batch, self.args.steps_per_generation)
            return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model, inputs):
        with self.phases("loss"):
            return super()._compute_loss(model, inputs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self._step_ended:
            self.phases.reset()
            self._attachment.meter.reset()
        with self.phases("backward"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_ended = self.accelerator.sync_gradients  # a short window is one too: `_step` counts on behind it
        if self._step_ended:
            self._log_step()
            if not self.args.capture_max_age:
                self.captures.drop()  # the optimizer's step makes them old
        return loss

    def _log_step(self) -> None:
        """Our metrics of one optimizer step."""
        meter, seconds = self._attachment.meter, self.phases.seconds
        update = self.phases.collectives["forward"] + self.phases.collectives["backward"]
        metrics: dict[str, float] = {f"{kind}s": update[kind] for kind in COUNTED}
        metrics |= {f"seconds/{phase}": seconds[phase] for phase in ("rollout", "score", "forward", "backward")}
        metrics |= {
            f"{kind}_bytes": meter.kept_bytes.get(kind, 0) for kind in ("hidden", "state", "graphs", "last_layer")
        }
        metrics["prompt_tokens_captured"] = meter.prompt_tokens_captured
        metrics["prompt_tokens_saved"] = meter.prompt_tokens_saved
        metrics["prompt_tokens_reused"] = meter.prompt_tokens_reused
        metrics["captured_bytes"] = self.captures.nbytes
        metrics["peak_bytes"] = peak_bytes(self.accelerator.device)
        metrics["prompt_grad_layers"] = self._attachment.exact_layers
        for name, value in metrics.items():
            self._metrics["train"][f"longstraw/{name}"].append(value)


def keep_out_of_autocast(head: torch.nn.Module) -> None:
    """The parent casts the head to float32, and calls it outside of autocast."""
    cast_forward = head.forward

    def forward(hidden_states: Tensor) -> Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return cast_forward(hidden_states)

    head.forward = forward  # type: ignore[method-assign]


def tokenizer_of(model: "str | PreTrainedModel", args: Any) -> Any:
    """The tokenizer alone, where the parent would take a model of text and images for one that is given images."""
    revision = (args.model_init_kwargs or {}).get("revision") if isinstance(model, str) else None
    return AutoTokenizer.from_pretrained(
        model if isinstance(model, str) else get_config_model_id(model.config),
        revision=revision,
        truncation_side="left",
        padding_side="left",
        trust_remote_code=args.trust_remote_code,
    )
