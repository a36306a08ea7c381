"""Modules train in two processes by DistributedDataParallel."""

import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sbnet_cupy as sb
from support.torch_cases import on_device

STEP = """
    import os, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import sbnet_cupy.torch as st

    backend, device = {backend!r}, {device!r}
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    where = device if device == "cpu" else f"cuda:{{rank}}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = st.nn.SparseConv2d(3, 6, 3, padding=1, block_size=8)
            self.unit = st.nn.SparseBottleneck(6, 4, block_size=8)

        def forward(self, x, mask):
            return self.unit(self.conv(x, mask), mask)

    net = DistributedDataParallel(Net().to(where))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    x, mask = torch.randn(2, 3, 16, 16, device=where), torch.rand(2, 16, 16, device=where) > 0.99
    first = None
    for _ in range(4):
        loss = (net(x, mask) - 1).square().mean()
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < first, (loss.item(), first)
    for p in net.parameters():
        both = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(both, p.detach())
        assert torch.equal(*both)
    dist.destroy_process_group()
    print("trained", flush=True)
    os._exit(0)  # the backend's threads may still be ending, which a plain exit takes ill
"""


def run_two(code, tmp_path):
    script = tmp_path / "step.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    root = Path(sb.__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "meeting")],
            env=os.environ | {"RANK": str(rank), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0 and out.strip().endswith("trained"), err[-3000:]


def test_two_processes_train_together(torch, tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("needs a PyTorch with torch.distributed")
    run_two(STEP.format(backend="gloo", device="cpu"), tmp_path)


@pytest.mark.gpu
def test_two_gpus_train_together(torch, require, tmp_path):
    on_device(require, torch, "cuda")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_two(STEP.format(backend="nccl", device="cuda"), tmp_path)


@pytest.mark.parametrize("root", [False, True])
def test_layers_that_fsdp_shards_have_weights_while_they_run(st, torch, tmp_path, root):
    """They are computed then, in evaluation too, and from what was gathered last."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard") or not hasattr(fsdp, "FSDPModule"):
        pytest.skip("needs fully_shard")
    nn, distributed = torch.nn, torch.distributed
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    sharded = copy.deepcopy(dense.eval().double())
    x, mask = torch.randn(1, 3, 32, 32).double(), torch.zeros(1, 32, 32)
    mask[0, 3:9, 3] = 1
    meeting = f"file://{tmp_path}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        parts = [sharded] if root else [sharded[0], sharded[2], sharded]
        for part in parts:
            fsdp.fully_shard(part, mesh=mesh, reshard_after_forward=True)
        found, expected = (st.sparsify(model, 16) for model in (sharded, dense))
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(found(x, mask), expected(x, mask))
                for parameter in (*sharded.parameters(), *dense.parameters()):
                    parameter.mul_(2)
    finally:
        distributed.destroy_process_group()
