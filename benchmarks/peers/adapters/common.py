"""What every adapter does: read the job, load the model, measure, write the result. Runs in the peer's environment.

A job is JSON: `model` (a folder), `ids` (one list of token ids), `target` (a token id), `repeats`. A result has
`scores` or `map`, `seconds` of processor time (the best repeat), `memory` (bytes above the loaded model at the peak).
"""

import json
import resource
import sys
import time
from pathlib import Path


def read_job():
    return json.loads(Path(sys.argv[1]).read_text())


def load_model(job, attention="sdpa"):
    """The causal language model of the job in float32, and its ids as a batch of one."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation=attention)
    return model.eval(), torch.tensor([job["ids"]])


def measure(job, compute):
    """What `compute` returns, the processor time of its best call, and the growth of the peak memory."""
    before = _peak()
    seconds = []
    for _ in range(job["repeats"]):
        start = time.process_time()
        found = compute()
        seconds.append(time.process_time() - start)
    return found, {"seconds": min(seconds), "memory": _peak() - before}


def write_result(result):
    Path(sys.argv[2]).write_text(json.dumps(result))


def _peak():
    """Peak resident bytes of this process; Linux counts in kilobytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
