"""The library over two ranks: models that were wrapped or converted before or after they were quantized."""

from __future__ import annotations

from pathlib import Path

from convert_bn_checks import check
from ranks import differences, run_requests, torchrun

HERE = Path(__file__).parent


def test_batch_norms_that_were_converted_before_or_after(tmp_path):
    done = torchrun(2, HERE / "convert_bn.py", tmp_path, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(check(tmp_path, 1e-5)) == 4


def test_it_fails_where_synchronised_norms_are_not_known(tmp_path):
    """The scenario sees a registry without SyncBatchNorm."""
    code = "import torch, runpy, sys; from hf_ptq.quantization.modules import KINDS; KINDS.pop(torch.nn.SyncBatchNorm); "
    (tmp_path / "without.py").write_text(
        f"{code}sys.argv = [{str(HERE / 'convert_bn.py')!r}, {str(tmp_path)!r}]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n",
        encoding="utf-8",
    )
    done = torchrun(2, tmp_path / "without.py", seconds=300)
    assert done.returncode != 0
    assert "a SyncBatchNorm holds a quantizer, and is no kind that can be quantized" in done.stderr
    assert not (tmp_path / "quantize first-off.pt").exists()
    saved = __import__("torch").load(tmp_path / "convert first-on.pt", weights_only=True)
    assert "BatchNorm" not in saved["summary"], "the check of the files fails as well"


def test_fsdp2_exports_what_one_process_exports(tiny, token_rows, tmp_path):
    """Quantized after sharding, and restored into a sharded model: the bytes are those of the command."""
    sources = {name: tiny(name) for name in ("llama_wide", "qwen3_moe")}
    base = {"datasets": [str(token_rows)], "device": "cpu", "durable": False, "skip_generate": True, "batch_size": 4}
    for name, source in sources.items():
        requests = [{**base, "model": str(source), "qformat": "nvfp4", "export_path": tmp_path / f"{name}-command"}]
        run_requests(0, requests, tmp_path)
    done = torchrun(2, HERE / "sharded_export.py", token_rows, tmp_path, *sources.values(), seconds=400)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in sources:
        for kind in ("direct", "restored"):
            assert differences(tmp_path / f"{name}-command", tmp_path / f"{name}-{kind}") == [], (name, kind)
