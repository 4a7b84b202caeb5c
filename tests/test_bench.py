"""mla_cute.bench without a GPU: formulas, records, the table, and that nothing unchecked passes."""

import json

import pytest
import torch

import mla_cute
from mla_cute import bench

RECORD = {
    "op": "sparse_decode", "kv_format": "v32", "b": 2, "h_q": 128, "s_q": 1, "s_kv": 512, "topk": 64, "extra_topk": 0,
    "us": 20.0, "split_us": 15.0, "combine_us": 4.0, "tflops": 100.4, "gbps": 300.0, "peer": "flash_mla", "peer_us": 30.0,
    "checked": True, "gpu": "NVIDIA H200", "driver": "1", "torch": "2", "dsl": "4", "commit": "abc", "date": "2026-01-01",
}  # fmt: skip


def test_formulas_by_hand():
    case = {"b": 128, "h_q": 128, "s_q": 2, "s_kv": 32768, "topk": 2048}
    assert bench.flops(case) == 2 * 256 * 2048 * 128 * 1088
    assert bench.num_bytes(case, 1000) == 2 * 256 * 128 * 1088 + 656_000


def test_records_append_and_the_latest_counts(tmp_path):
    path = tmp_path / "h200" / "sparse_decode.json"
    other = RECORD | {"b": 4}
    bench.append(path, [RECORD, other])
    bench.append(path, [RECORD | {"us": 10.0}])
    records = json.loads(path.read_text())
    assert [r["us"] for r in records] == [20.0, 20.0, 10.0]
    assert [(r["b"], r["us"]) for r in bench.latest(records)] == [(2, 10.0), (4, 20.0)]


def test_a_variant_never_takes_the_shipped_row(tmp_path, capsys):
    path = tmp_path / "r.json"
    bench.append(path, [RECORD, RECORD | {"us": 1.0, "variant": "raw_slots=1"}])
    bench.main(["table", str(path)])
    printed = capsys.readouterr().out
    assert "| 20.0 (15.0 / 4.0) |" in printed
    assert "| 1.0 (" not in printed


def test_table_and_readme(tmp_path, capsys):
    path, readme = tmp_path / "r.json", tmp_path / "README.md"
    bench.append(path, [RECORD, RECORD | {"b": 4, "peer": None, "peer_us": None}])
    readme.write_text("a\n<!-- speed-table:start -->\nstale\n<!-- speed-table:end -->\nz\n")
    bench.main(["table", str(path), "--write", str(readme)])
    row = "| 2 | 128 | 1 | 64 | 20.0 (15.0 / 4.0) | 100 | 300 | 30.0 | 1.50 |"
    assert row in capsys.readouterr().out
    text = readme.read_text()
    assert row in text and "| - | - |" in text and "stale" not in text
    assert text.startswith("a\n") and text.endswith("\nz\n")


@pytest.mark.parametrize("text", [None, "no JSON", ""])
def test_a_file_that_cannot_be_read(tmp_path, capsys, text):
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as e:
        bench.main(["table", str(path)])
    assert e.value.code == 1
    assert capsys.readouterr().err.startswith(f"table: cannot read {path}: ")


@pytest.mark.parametrize(
    "case", ["b=1", "b=x,h_q=128,s_q=2,s_kv=32768,topk=2048", "", "b=1,h_q=1,s_q=1,s_kv=1,topk=1,x=2"]
)
def test_a_case_that_is_none(capsys, case):
    with pytest.raises(SystemExit) as e:
        bench.main(["sparse_decode", "--case", case])
    assert e.value.code == 2
    assert "argument --case: invalid case_of value" in capsys.readouterr().err


def test_an_impl_that_is_none(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as e:
        bench.main(["sparse_decode", "--impl", "nonesuch"])
    assert e.value.code == 1
    assert capsys.readouterr().err.startswith("sparse_decode: impl: must be an importable module")


def test_a_wrong_result_is_not_timed():
    q, kv_cache, indices, sink = bench.make_case({"b": 3, "h_q": 4, "s_q": 2, "s_kv": 100, "topk": 40}, "cpu")
    assert ((indices >= 0).sum(-1) > 0).all() and indices.max() < kv_cache.shape[0] * 64
    out, lse = mla_cute.sparse_decode(q, kv_cache, indices, attn_sink=sink)
    bench.check(q, kv_cache, indices, sink, out, lse)
    with pytest.raises(AssertionError, match="out"):
        bench.check(q, kv_cache, indices, sink, out * 1.1, lse)
    with pytest.raises(AssertionError, match="lse"):
        bench.check(q, kv_cache, indices, sink, out, lse + 0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("command", ["sparse_decode", "host", "first-call"])
def test_no_gpu_is_said(command, capsys):
    with pytest.raises(SystemExit) as e:
        bench.main([command])
    assert e.value.code == 1
    assert "needs a GPU" in capsys.readouterr().err
