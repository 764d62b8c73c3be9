"""Collectives of one prompt group's forward and backward: ours beside stock rows, two gloo processes on a CPU.

    run with   python -m benchmarks.collectives

A Llama of 4 layers (tests/models.py) under ZeRO-3 (prefetch 0, persistence 0, reuse distance 0, reduce bucket 1e7) and
FSDP2 (one unit a layer and the root; or as accelerate wraps it). `rows`: the stock model, one response at a time,
reduced after each; `no_sync`: FSDP2 with the reduction put off, which ZeRO-3 refuses; `coalesced`: DeepSpeed's
`engine.coalesce_grad_reduction()`; both hold the whole model's gradient on each rank meanwhile; `leaves`: with the
layers as ZeRO-3 leaf modules, as ours has them. Counted in the third such step, on rank 0, without the optimizer's
step. Ours has one all-reduce of a few bytes, with which all ranks raise what one finds wrong: counted apart.
"""

import contextlib
from typing import Any

import torch

from longstraw_dist import LongStrawConfig
from longstraw_dist.meter import count_collectives
from tests.distributed.launch import Ranks
from tests.distributed.wrappings import ZERO, wrap
from tests.models import ragged, tiny, weigh
from tests.reference import stock_rows

from .conditions import RESULTS, conditions, show, write

LAYERS, CHUNK, RESPONSE = 4, 8, 5
STEPS = 3  # ZeRO-3 records its trace in the first two
GROUPS = [(4, 1), (8, 5), (16, 5)]  # (responses, chunks of the prompt)
SCHEDULES = [
    ("zero3", "rows"),
    ("zero3", "rows, coalesced"),
    ("zero3", "rows, leaves, coalesced"),
    ("zero3", "ours"),
    ("fsdp2", "rows"),
    ("fsdp2", "rows, no_sync"),
    ("fsdp2", "ours"),
    ("fsdp2_accelerate", "rows"),
    ("fsdp2_accelerate", "rows, no_sync"),
    ("fsdp2_accelerate", "ours"),
]


def count(engine: str, schedule: str, responses: int, chunks: int) -> dict[str, int]:
    ours, coalesced = schedule == "ours", "coalesced" in schedule
    leaves: dict[str, Any] = {"leaf_module": {"classes": ["LlamaDecoderLayer"]}} if "leaves" in schedule else {}
    wrapped = wrap(
        engine,
        lambda: tiny("llama", num_hidden_layers=LAYERS),
        LongStrawConfig(prompt_chunk_size=CHUNK) if ours else None,
        accumulation=1 if ours or coalesced else responses,
        **leaves,
    )
    wrapped.no_sync = "no_sync" in schedule
    for step in range(STEPS):
        (group,) = ragged(step, [(1 + CHUNK * chunks, (RESPONSE,) * responses)])
        with count_collectives() as counts:
            if ours:
                with wrapped.micro_batch_of_step():
                    out = wrapped(prompt_groups=[group])
                    wrapped.backward(weigh(out.logps, out.entropies))
            else:
                with wrapped.module.coalesce_grad_reduction() if coalesced else contextlib.nullcontext():
                    for response in group.response_ids:
                        row = [type(group)(group.prompt_ids, [response])]
                        with contextlib.nullcontext() if coalesced else wrapped.micro_batch_of_step():
                            wrapped.backward(weigh(*stock_rows(wrapped.module, row)))
        wrapped.step()
    return dict(counts)


def main() -> None:
    ranks, rows = Ranks(2), []
    try:
        for engine, schedule in SCHEDULES:
            for responses, chunks in GROUPS:
                counts = ranks.run(count, engine, schedule, responses, chunks, timeout=120)[0]
                assert engine not in ZERO or schedule != "ours" or counts["all_gather"] <= 2 * LAYERS + 6
                rows.append(
                    {
                        "engine": engine,
                        "schedule": schedule,
                        "responses": responses,
                        "prompt_chunks": chunks if schedule == "ours" else "",
                        **{k: counts.get(k, 0) for k in ("all_gather", "reduce_scatter", "all_reduce")},
                    }
                )
    finally:
        ranks.stop()
    torch.set_num_threads(1)
    import accelerate
    import deepspeed

    comments = [
        "collectives of one prompt group's forward and backward, a rank; " + conditions() + ", two gloo processes",
        f"DeepSpeed {deepspeed.__version__}, accelerate {accelerate.__version__}; Llama, {LAYERS} layers; third step",
    ]
    write(RESULTS / "collectives.csv", rows, comments)
    show(rows, comments)


if __name__ == "__main__":
    main()
