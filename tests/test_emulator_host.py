"""emulator/host.py: the compiled host code, run on CPU tensors, launches what the kernels' sources say it should."""

import ctypes
import functools
import math
import os
import re
import struct
import subprocess
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from cutlass import Int32, cute

from mla_cute import jit, schedule_kernel, select_impl
from mla_cute.emulator import host
from mla_cute.emulator.host import HostFunction, Launch, compile_for_emulation
from mla_cute.kv_cache import V32
from mla_cute.schedule import scratch_size
from mla_cute.sm90 import sparse_decode as sm90
from mla_cute.validate import Problem

pytestmark = pytest.mark.compile

NAIVE = select_impl("cpu", str(Path(__file__).parents[1] / "examples" / "naive_sparse_decode.py"))
LOG2_E = math.log2(math.e)


def param_sizes(ptx):
    """kernel name -> bytes of each .param: `.param .align 8 .b8 name[24]`, `.param .u32 name`."""
    found = {}
    for text in ptx:
        for kernel, params in re.findall(r"\.entry\s+(\w+)\(([^)]*)\)", text):
            declared = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s+\w+(?:\[(\d+)\])?", params)
            found[kernel] = [int(bits) // 8 * int(count or 1) for bits, count in declared]
    return found.__getitem__


@functools.cache
def compiled(module, problem, config, arch):
    return compile_for_emulation(module, problem, config, arch)


@functools.cache
def host_function(module, problem, config, arch="sm_90a"):
    object_file, symbol, ptx = compiled(module, problem, config, arch)
    return HostFunction(object_file, symbol, param_sizes(ptx), arch=arch)


def words(*values):
    return struct.pack(f"{len(values)}Q", *values)


class Scatter:
    """a[b] = s by thread 0 of CTA (b, 0): the smallest kernel with a launch of one's choice."""

    def __init__(self, **launch):
        self.launch = launch

    @cute.jit
    def __call__(self, a: cute.Tensor, s: Int32, stream):
        self.kernel(a, s).launch(grid=[a.shape[0], 2, 1], block=[64, 1, 1], stream=stream, **self.launch)

    @cute.kernel
    def kernel(self, a: cute.Tensor, s: Int32):
        if cute.arch.thread_idx()[0] == 0:
            a[cute.arch.block_idx()[0]] = s


Scatter.kernel.set_name_prefix("scatter", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile_scatter(problem, config, arch):
    a = jit.fake_tensor(Int32, (cute.sym_int(),), stride=(cute.sym_int64(),), align=8)
    return jit.build(Scatter(**dict(problem)), a, Int32(0), jit.fake_stream(), arch=arch)


SCATTER = ModuleType("scatter")
SCATTER.compile = compile_scatter


def scatter(arch="sm_90a", **launch):
    return host_function(SCATTER, tuple(launch.items()), None, arch)


# ----- sparse decode --------------------------------------------------------------------------------------------------


PROBLEMS = {
    64: Problem(op="sparse_decode", h_q=64),
    128: Problem(op="sparse_decode", h_q=128, has_topk_length=True, has_attn_sink=True),
}


def sparse_args(h_q, b=2, s_q=1, topk=128, parts=3, **replace):
    problem = PROBLEMS[h_q]
    args = {
        "q": torch.zeros(b, s_q, h_q, 576, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(4, 64, 1, 656, dtype=torch.uint8),
        "indices": torch.zeros(b, s_q, topk, dtype=torch.int32),
        "topk_length": torch.zeros(b, dtype=torch.int32) if problem.has_topk_length else None,
        **dict.fromkeys(("extra_kv_cache", "extra_indices", "extra_topk_length")),
        "attn_sink": torch.zeros(h_q) if problem.has_attn_sink else None,
        "softmax_scale": 0.125,
        "metadata": torch.zeros(parts, 8, dtype=torch.int32),
        "num_splits": torch.zeros(b + 1, dtype=torch.int32),
        "scratch": torch.empty(scratch_size(parts, s_q, h_q)),
        "out": torch.zeros(b, s_q, h_q, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(b, s_q, h_q),
        "max_splits": parts,
        "nonce": 2**62 + 1,
    }
    return args | replace


def sparse_decode(h_q):
    problem = PROBLEMS[h_q]
    return host_function(sm90, problem, sm90.default_config(problem))


@pytest.mark.parametrize("h_q, s_q", [(64, 1), (128, 2)])
def test_sparse_decode(h_q, s_q):
    args = sparse_args(h_q, s_q=s_q)
    main, combine = sparse_decode(h_q)(*args.values())
    config = sm90.default_config(PROBLEMS[h_q])

    assert main.kernel.startswith("mla_sparse_decode_sm90") and combine.kernel.startswith("mla_combine")
    assert (main.grid, main.block) == ((h_q // 64, s_q, 3), (384, 1, 1))
    at_most = config.smem_bytes(V32)  # which counts a whole alignment
    assert at_most - 1024 <= main.smem_bytes <= at_most
    assert not main.pdl and not main.cooperative and main.cluster == (1, 1, 1)
    blocks = s_q * (h_q // 16) * 16  # of 16 heads and 32 columns, a warp each, of one request at most
    assert (combine.grid, combine.block) == ((min(blocks // 8, 2 * math.prod(main.grid)), 1, 1), (256, 1, 1))
    assert combine.pdl and not combine.cooperative and combine.smem_bytes < 20480 and combine.cluster == (1, 1, 1)

    # A tensor's parameter begins with its address. Absent tensors are none; the descriptors of q and out come last.
    pointers = {name: t.data_ptr() for name, t in args.items() if isinstance(t, torch.Tensor)}
    pointers["lse_partial"] = pointers["scratch"] + 4 * 2 * 3 * s_q * h_q * 512
    pointers["flags"] = pointers["lse_partial"] + 2 * 4 * 2 * 3 * s_q * h_q
    assert pointers["flags"] % 8 == 0
    assert pointers["flags"] + 8 * 2 * 3 * s_q * (h_q // 64) * 2 == pointers["scratch"] + 4 * args["scratch"].numel()
    names = {pointer: name for name, pointer in pointers.items()}

    def tensors(launch):
        found = [names.get(struct.unpack_from("Q", p)[0]) for p in launch.params if len(p) >= 8]
        return [name for name in found if name]

    optional = [name for name in ("topk_length", "attn_sink") if name in pointers]
    of_main = ["q", "kv_cache", "indices", *optional, "metadata", "num_splits", "scratch", "lse_partial", "flags"]
    of_main += ["out", "lse", "q", "out"]
    of_combine = ["metadata", "num_splits", "scratch", "lse_partial", *optional[1:], "out", "lse"]
    assert (tensors(main), tensors(combine)) == (of_main, of_combine)
    (scale_log2,) = [p for p in main.params if len(p) == 4]
    assert scale_log2 == (np.float32(0.125) * np.float32(LOG2_E)).tobytes()
    assert struct.pack("q", 2**62 + 1) in main.params
    tma_q, tma_out = [p for p in main.params if len(p) == 128]
    assert tma_q[32:40] == struct.pack("2I", 575, h_q - 1)  # columns - 1, rows - 1
    assert tma_out[32:40] == struct.pack("2I", 511, h_q - 1)


def test_one_part_needs_no_combine_and_no_scratch():
    args = sparse_args(64, parts=1)
    assert args["scratch"].numel() == 0
    (main,) = sparse_decode(64)(*args.values())
    assert main.grid == (1, 1, 1)


@pytest.mark.parametrize("replace", [{"max_splits": 2}, {"parts": 2}], ids=["at most two pieces", "two parts"])
def test_two_pieces_need_no_combine(replace):
    assert len(sparse_decode(64)(*sparse_args(64, **replace).values())) == 1


def test_strides_reach_the_kernel():
    q = torch.zeros(1, 1, 64, 640, dtype=torch.bfloat16).as_strided((1, 1, 64, 576), (8000, 123464, 640, 1))
    kv_cache = torch.zeros(3, 70 * 656 + 32, dtype=torch.uint8)[:, : 64 * 656].view(3, 64, 1, 656)
    main, _ = sparse_decode(64)(*sparse_args(64, b=1, q=q, kv_cache=kv_cache).values())
    q_param, kv_param, *_ = main.params
    tma_q = next(p for p in main.params if len(p) == 128)
    # Also strides of dims with one element, which torch's own DLPack may rewrite.
    assert words(8000, 123464, 640) in q_param
    assert words(70 * 656 + 32) in kv_param
    assert struct.unpack_from("I", tma_q, 12)[0] == 640 * 2 // 16  # row pitch in 16 bytes


def test_wrong_arguments_are_refused():
    run = sparse_decode(64)

    def call(**replace):
        return run(*sparse_args(64, **replace).values())

    with pytest.raises(ValueError, match="argument #1.*expected dtype=uint8"):
        call(kv_cache=torch.zeros(4, 64, 1, 656, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"q.shape\[2\]"):
        call(q=torch.zeros(2, 1, 63, 576, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"q.*align"):  # the address is 2 bytes past a multiple of 16
        flat = torch.zeros(2 * 64 * 576 + 8, dtype=torch.bfloat16)
        offset = 1 + (-flat.data_ptr() // 2) % 8
        call(q=flat[offset : offset + 2 * 64 * 576].view(2, 1, 64, 576))
    with pytest.raises(TypeError, match="argument #3"):
        call(topk_length=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="argument #12: must be on the CPU.*meta"):
        call(out=torch.zeros(2, 1, 64, 512, dtype=torch.bfloat16, device="meta"))
    assert len(call()) == 2


def test_exceptions_of_the_callback_reach_the_caller():
    run, args = sparse_decode(64), sparse_args(64).values()
    for error in (KeyError("out of range"), KeyboardInterrupt()):
        seen = []

        def on_launch(launch, seen=seen, error=error):
            seen.append(launch.kernel)
            raise error

        with pytest.raises(type(error)) as caught:
            run(*args, on_launch=on_launch)
        assert caught.value is error and len(seen) == 1  # combine is not launched any more

    object_file, symbol, _ = compiled(sm90, PROBLEMS[64], sm90.default_config(PROBLEMS[64]), "sm_90a")
    with pytest.raises(KeyError, match="mla_sparse_decode_sm90"):
        HostFunction(object_file, symbol, {}.__getitem__)(*args)
    seen = []
    assert run(*args, on_launch=seen.append) == seen and len(seen) == 2


def test_line_info_leads_to_the_python_source():
    (ptx,) = compiled(sm90, PROBLEMS[64], sm90.default_config(PROBLEMS[64]), "sm_90a").ptx
    files = dict(re.findall(r'\.file\s+(\d+) "(.+)"', ptx))
    sources = {number: Path(path).read_text().splitlines() for number, path in files.items()}
    assert str(Path(sm90.__file__)) in files.values()
    expected = {  # opcode -> what stands on the line
        "wgmma.mma_async": r"cute\.gemm\(",
        "stmatrix": r"cute\.copy\(copy_p,|inline_ptx\(",
        "cp.async.bulk.tensor": r"cute\.copy\(tma_(q|out),",
        "mbarrier.init": r"mbarrier_init\(",
        "ex2.approx": r"math\.exp2\(",
        "griddepcontrol": r"griddepcontrol_(wait|launch_dependents)\(",
    }
    count, where = dict.fromkeys(expected, 0), None
    for line in ptx.splitlines():
        if found := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            where = found.groups()
        for opcode, text in expected.items():
            if re.match(rf"\s*(@\S+\s+)?{re.escape(opcode)}", line):
                assert re.search(text, sources[where[0]][int(where[1]) - 1]), (line, where)
                count[opcode] += 1
    assert min(count.values()) > 0


# ----- other functions ------------------------------------------------------------------------------------------------


def test_planner():
    plan = host_function(schedule_kernel, schedule_kernel.PlanProblem(True, use_workspace=False), None)
    length = torch.zeros(10, dtype=torch.int32)[1::2]
    metadata, num_splits = torch.zeros(7, 8, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    (launch,) = plan(length, 2048, None, 700, 64, 5, None, metadata, num_splits)
    assert launch.kernel.startswith("mla_schedule_sm90")
    assert (launch.grid, launch.block, launch.cluster) == ((1, 1, 1), (1024, 1, 1), (1, 1, 1))
    assert not launch.pdl and not launch.cooperative
    cost = 4 * (schedule_kernel.SMEM_REQUESTS + 1)
    cuts = 4 * schedule_kernel.CUT_FIELDS * (schedule_kernel.SMEM_PARTS + 1)
    assert 0 <= launch.smem_bytes - (cost + cuts) < 1024  # and a few words for the warps
    first, *scalars, m, n = launch.params
    assert (
        first[:8] == words(length.data_ptr()) and first[16:24] == words(2) and struct.unpack_from("i", first, 8)[0] == 5
    )
    assert scalars == [struct.pack("i", value) for value in (2048, 700, 64, 5)]
    assert (m[:8], n[:8]) == (words(metadata.data_ptr()), words(num_splits.data_ptr()))
    with pytest.raises(ValueError, match="on the CPU"):
        plan(length.to("meta"), 2048, None, 700, 64, 5, None, metadata, num_splits)


def test_naive_example():
    args = sparse_args(64, s_q=3)
    (launch,) = host_function(NAIVE, PROBLEMS[64], NAIVE.Config())(*args.values())
    assert launch.kernel.startswith("mla_naive_sparse_decode")
    assert (launch.grid, launch.block, launch.smem_bytes) == ((2 * 16, 3, 1), (128, 1, 1), 0)
    pointers = [struct.unpack_from("Q", p)[0] for p in launch.params if len(p) >= 16]
    assert pointers == [args[name].data_ptr() for name in ("q", "kv_cache", "indices", "out", "lse")]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_launch_attributes(arch):
    a = torch.zeros(4, dtype=torch.int32)
    size = {"smem": 4096, "cluster": (2, 1, 1)}
    (launch,) = scatter(arch, **size)(a, 7)
    assert launch == Launch("scatter_0", (4, 2, 1), (64, 1, 1), (2, 1, 1), 4096, False, False, launch.params)
    tensor, s = launch.params
    assert tensor[:8] == words(a.data_ptr()) and s == struct.pack("i", 7)
    (launch,) = scatter(arch, use_pdl=True, cooperative=True)(a, 7)
    assert launch.pdl and launch.cooperative and launch.cluster == (1, 1, 1) and launch.smem_bytes == 0
    (launch,) = scatter(arch, cluster=(4, 1, 1), fallback_cluster=(2, 1, 1))(a, 7)
    assert (launch.cluster, launch.preferred) == ((2, 1, 1), (4, 1, 1))


def test_launches_that_cuda_refuses():
    with pytest.raises(ValueError, match="scatter_0: grid must be 1 to"):
        scatter()(torch.zeros(0, dtype=torch.int32), 7)
    with pytest.raises(ValueError, match="scatter_0: grid must be a multiple of cluster"):
        scatter(smem=4096, cluster=(2, 1, 1))(torch.zeros(3, dtype=torch.int32), 7)
    with pytest.raises(ValueError, match=r"smem_bytes must be at most 232448, got .* 300000"):
        scatter(smem=300000)(torch.zeros(3, dtype=torch.int32), 7)


def test_what_would_change_the_launch_is_an_error():
    def read(number, value):
        record = ctypes.create_string_buffer(struct.pack("ii", number, 0) + value, host.ATTRIBUTE_BYTES)
        config = host._LaunchConfig((1, 1, 1), (32, 1, 1), 0, None, ctypes.addressof(record), 1)
        return host._read_launch(config, "k", None, lambda kernel: [])

    assert read(8, struct.pack("i", 3)) == read(12, words(0)) == read(14, struct.pack("i", 50))
    with pytest.raises(NotImplementedError, match="k: launched with a launch completion event"):
        read(12, words(0x1234))
    with pytest.raises(NotImplementedError, match="k: launched with cudaLaunchAttribute 99"):
        read(99, words(0))


def test_dtypes():
    for dtype, kind in ((torch.bool, "bool"), (torch.bfloat16, "bfloat16"), (torch.float8_e4m3fn, "float8_e4m3fn"),
                        (torch.uint8, "uint8"), (torch.float32, "float32"), (torch.int64, "int64")):  # fmt: skip
        seen = host._as_cuda(0, torch.zeros(3, 0, 5).to(dtype).requires_grad_(dtype is torch.float32))
        assert str(seen.dtype) == kind and tuple(seen.shape) == (3, 0, 5) and str(seen.device) == "cuda:0"


# ----- loading --------------------------------------------------------------------------------------------------------


def test_the_same_function_twice_and_two_at_a_time():
    object_file, symbol, ptx = compiled(SCATTER, (), None, "sm_90a")
    first, second = (HostFunction(object_file, symbol, param_sizes(ptx)) for _ in range(2))
    seen, a = ([], []), torch.zeros(1, dtype=torch.int32)
    assert first(a, 1, on_launch=seen[0].append) == seen[0]
    assert second(a, 2, on_launch=seen[1].append) == seen[1]
    assert [launch.params[1] for launches in seen for launch in launches] == [struct.pack("i", i) for i in (1, 2)]

    wrong = []

    def many(value):
        for _ in range(100):
            if [launch.params[1] for launch in first(a, value)] != [struct.pack("i", value)]:
                wrong.append(value)

    threads = [threading.Thread(target=many, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    object_file, symbol, ptx = compiled(SCATTER, (), None, "sm_90a")
    path = tmp_path / "scatter.o"
    path.write_bytes(object_file)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    run = HostFunction(path, symbol, param_sizes(ptx))
    assert not os.listdir(tmp_path / "tmp")
    assert len(run(torch.zeros(1, dtype=torch.int32), 1)) == 1


def test_unknown_symbol(tmp_path):
    source = "int _cudaGraphLaunch(void *), _cudaFree(void *); int f() { return _cudaGraphLaunch(0) + _cudaFree(0); }"
    path = tmp_path / "f.o"
    subprocess.run([*host._compiler(), "-fPIC", "-c", "-x", "c", "-", "-o", path], input=source, text=True, check=True)
    with pytest.raises(NotImplementedError, match="f: its host code calls _cudaFree, _cudaGraphLaunch, unknown"):
        HostFunction(path, "f", lambda kernel: [])


def test_bad_object_file():
    object_file, _, ptx = compiled(SCATTER, (), None, "sm_90a")
    with pytest.raises(ValueError, match="no function 'other'"):
        HostFunction(object_file, "other", param_sizes(ptx))
    with pytest.raises(RuntimeError, match="cannot be linked"):
        HostFunction(b"no object file", "k", param_sizes(ptx))
    with pytest.raises(NotImplementedError, match="arch: must be.*sm_80"):
        HostFunction(object_file, "k", param_sizes(ptx), arch="sm_80")


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs a C compiler.*no cc found; install.*CC"):
        HostFunction(b"", "k", lambda kernel: [])
    monkeypatch.setenv("CC", "mycc -m64")
    with pytest.raises(RuntimeError, match="no mycc found"):
        HostFunction(b"", "k", lambda kernel: [])


def test_plain_callable():
    with pytest.raises(TypeError, match=r"plain\.compile must return a DSL function"):
        compile_for_emulation(SimpleNamespace(compile=lambda *_: print, __name__="plain"), None, None, "sm_90a")
