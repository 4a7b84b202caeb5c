"""validate.py: each bad argument is refused with a message that names it, says what is needed and what came."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_cute import kv_cache, validate
from mla_cute.validate import Problem, check_sparse_decode

B, S_Q, H_Q, TOPK, BLOCKS, PAGE = 2, 3, 4, 5, 6, 7
BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8


def good(**changes):
    args = {
        "q": torch.zeros(B, S_Q, H_Q, 576, dtype=BF16),
        "kv_cache": torch.zeros(BLOCKS, PAGE, 1, 656, dtype=U8),
        "indices": torch.zeros(B, S_Q, TOPK, dtype=I32),
        "softmax_scale": 0.1,
        "topk_length": torch.zeros(B, dtype=I32),
        "attn_sink": torch.zeros(H_Q),
        "out": torch.zeros(B, S_Q, H_Q, 512, dtype=BF16),
        "lse": torch.zeros(B, S_Q, H_Q),
    }
    return args | changes


def good_extra(**changes):
    return good(
        extra_kv_cache=torch.zeros(3, 9, 1, 656, dtype=U8),
        extra_indices=torch.zeros(B, S_Q, 11, dtype=I32),
        extra_topk_length=torch.zeros(B, dtype=I32),
    ) | changes


def model1(page=PAGE, blocks=BLOCKS, stride=None):
    return strided((blocks, page, 1, 584), (stride or -(-page * 584 // 16) * 16, 584, 584, 1), U8)


def check(args):
    args = dict(args)
    return check_sparse_decode(args.pop("q"), args.pop("kv_cache"), args.pop("indices"), **args)


def strided(shape, stride, dtype, offset=0):
    """Zeros with these strides (elements), `offset` elements past an aligned address."""
    size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    return torch.zeros(size, dtype=dtype).as_strided(shape, stride, offset)


def q_like(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=dtype)


class TestGood:
    def test_problem_says_what_is_there(self):
        assert check(good()) == Problem("sparse_decode", H_Q, 576, 512, "v32", True, True)
        bare = good(softmax_scale=None, topk_length=None, attn_sink=None, out=None, lse=None)
        assert check(bare) == Problem("sparse_decode", H_Q, 576, 512, "v32", False, False)
        assert check(bare | {"attn_sink": torch.zeros(H_Q)}) == Problem(h_q=H_Q, has_attn_sink=True)

    def test_formats_are_kv_caches(self):
        for size, fmt in validate.FORMATS.items():
            other = kv_cache.FORMATS[fmt.name]
            assert (size, fmt.d_qk, validate.D_V) == (other.bytes_per_token, other.d_qk, other.d_v)
        assert len(validate.FORMATS) == len(kv_cache.FORMATS)

    @pytest.mark.parametrize("page", [1, 2, 7, 61, 64])
    def test_model1(self, page):
        args = good(q=q_like(B, S_Q, H_Q, 512), kv_cache=model1(page))
        assert check(args) == Problem("sparse_decode", H_Q, 512, 512, "model1", True, True)
        args["kv_cache"] = model1(page, blocks=1, stride=584)  # one page: the stride is never walked
        assert check(args).kv_format == "model1"

    def test_extra(self):
        for more, length in (({}, True), ({"extra_topk_length": None}, False)):
            problem = Problem("sparse_decode", H_Q, 576, 512, "v32", True, True, True, length)
            assert check(good_extra(**more)) == problem
        args = good_extra(q=q_like(B, S_Q, H_Q, 512), kv_cache=model1(), extra_kv_cache=model1(2))
        assert check(args) == Problem("sparse_decode", H_Q, 512, 512, "model1", True, True, True, True)
        one = good_extra(extra_indices=strided((B, S_Q, 1), (5, 1, 7), I32, offset=1))
        assert check(one).has_extra

    @pytest.mark.parametrize("h_q, tiles", [(1, 1), (64, 1), (65, 2), (128, 2)])
    def test_head_tiles(self, h_q, tiles):
        args = good(q=q_like(1, 1, h_q, 576), indices=torch.zeros(1, 1, 1, dtype=I32))
        args |= dict.fromkeys(("topk_length", "attn_sink", "out", "lse"))
        problem = check(args)
        assert (problem.h_q, problem.head_tiles) == (h_q, tiles)

    @pytest.mark.parametrize(
        "changes",
        [
            {"kv_cache": torch.zeros(BLOCKS, PAGE, 1, 656, dtype=torch.int8)},
            {"kv_cache": torch.zeros(BLOCKS, PAGE, 1, 656, dtype=U8).view(torch.float8_e4m3fn)},
            {"kv_cache": strided((BLOCKS, PAGE, 1, 656), (PAGE * 656 + 16, 656, 1, 1), U8)},  # gaps between pages
            {"kv_cache": strided((BLOCKS, 1, 1, 656), (672, 3, 5, 1), U8)},  # strides that are never walked
            {"kv_cache": strided((1, PAGE, 1, 656), (7, 656, 1, 1), U8)},
            {"kv_cache": torch.zeros(1, 1, 1, 656, dtype=U8).expand(2**31 - 1, 1, 1, 656)},  # the largest index
            {"q": strided((B, S_Q, H_Q, 576), (20000, 6000, 584, 1), BF16)},
            {"q": q_like(1, S_Q, H_Q, 576).expand(B, -1, -1, -1)},
            {"q": strided((B, S_Q, H_Q, 576), (S_Q * 576, 576, B * S_Q * 576, 1), BF16)},  # heads outermost
            {"indices": strided((B, S_Q, TOPK), (23, 7, 1), I32, offset=1)},
            {"out": strided((B, S_Q, H_Q, 512), (8000, 2100 + 4, 520, 1), BF16)},
            {"lse": strided((B, S_Q, H_Q), (H_Q, B * H_Q, 1), F32)},
            {"softmax_scale": 1},
        ],
        ids=lambda changes: "-".join(changes),
    )
    def test_every_legal_layout_passes(self, changes):
        assert check(good(**changes)) == Problem(h_q=H_Q, has_topk_length=True, has_attn_sink=True)

    def test_dims_of_size_1_may_have_any_stride(self):
        args = good(q=strided((1, 1, 1, 576), (3, 5, 7, 1), BF16), indices=strided((1, 1, 1), (2, 3, 4), I32))
        args |= {"out": strided((1, 1, 1, 512), (3, 5, 7, 1), BF16), "lse": strided((1, 1, 1), (2, 3, 4), F32)}
        args |= {"topk_length": strided((1,), (9,), I32), "attn_sink": strided((1,), (9,), F32)}
        assert check(args) == Problem(h_q=1, has_topk_length=True, has_attn_sink=True)

    def test_empty_batch_needs_no_page(self):
        args = good(q=q_like(0, S_Q, H_Q, 576), indices=torch.zeros(0, S_Q, TOPK, dtype=I32))
        args |= {"kv_cache": torch.zeros(0, PAGE, 1, 656, dtype=U8), "topk_length": torch.zeros(0, dtype=I32)}
        args |= {"out": q_like(0, S_Q, H_Q, 512), "lse": torch.zeros(0, S_Q, H_Q)}
        assert check(args).h_q == H_Q


# argument, value, error, message behind the argument's name
BAD = [
    # q
    ("q", None, TypeError, "must be a torch.Tensor, got NoneType"),
    ("q", q_like(B, S_Q, H_Q, 576).tolist(), TypeError, "must be a torch.Tensor, got list"),
    ("q", q_like(B, S_Q, H_Q, 576).to_sparse(), TypeError, "must be a dense (strided) tensor, got torch.sparse_coo"),
    ("q", q_like(B, S_Q, H_Q, 576, dtype=torch.float16), TypeError, "dtype must be bfloat16, got torch.float16"),
    ("q", q_like(B, S_Q, 576), ValueError, "must have 4 dims [b, s_q, h_q, d_qk], got shape [2, 3, 576]"),
    ("q", q_like(B, S_Q, H_Q, 576).to("meta"), ValueError, "device must be cpu or cuda, got meta"),
    (
        "q",
        q_like(B, S_Q, H_Q, 512),
        ValueError,
        "last dim d_qk must be 576 (V32: 512 latent + 64 RoPE values), got 512",
    ),
    ("q", q_like(B, S_Q, 0, 576), ValueError, "h_q (dim 2) must be 1 to 128, got 0"),
    ("q", q_like(B, S_Q, 129, 576), ValueError, "h_q (dim 2) must be 1 to 128, got 129"),
    ("q", q_like(B, 1, 1, 576).expand(B, 65_536, 1, 576), ValueError, "s_q (dim 1) must be at most 65535, got 65536"),
    ("q", q_like(B, 0, H_Q, 576), ValueError, "s_q (dim 1) must be at least 1, got 0"),
    ("q", q_like(B, S_Q, 576, H_Q).mT, ValueError, "last dim must be contiguous (stride 1), got stride 4"),
    (
        "q",
        strided((B, S_Q, H_Q, 576), (9999, 4 * 576, 576, 1), BF16),
        ValueError,
        "stride of dim 0 must be a multiple of 16 bytes (8 elements), got 9999 elements",
    ),
    (
        "q",
        strided((B, S_Q, H_Q, 576), (8000, 4 * 576 + 4, 576, 1), BF16),
        ValueError,
        "stride of dim 1 must be a multiple of 16 bytes (8 elements), got 2308 elements",
    ),
    (
        "q",
        strided((B, S_Q, H_Q, 576), (8000, 2320, 577, 1), BF16),
        ValueError,
        "stride of dim 2 must be a multiple of 16 bytes (8 elements), got 577 elements",
    ),
    (
        "q",
        strided((B, S_Q, H_Q, 576), (S_Q * H_Q * 576, H_Q * 576, 576, 1), BF16, offset=4),
        ValueError,
        "first element must be 16-byte aligned, got an address 8 bytes past one",
    ),
    # kv_cache
    ("kv_cache", "cache", TypeError, "must be a torch.Tensor, got str"),
    (
        "kv_cache",
        torch.zeros(BLOCKS, PAGE, 1, 656, dtype=BF16),
        TypeError,
        "dtype must be uint8 or int8 or float8_e4m3fn, got torch.bfloat16",
    ),
    (
        "kv_cache",
        torch.zeros(BLOCKS, PAGE, 656, dtype=U8),
        ValueError,
        "must have 4 dims [num_blocks, page_block_size, 1, 656 or 584], got shape [6, 7, 656]",
    ),
    (
        "kv_cache",
        torch.zeros(BLOCKS, PAGE, 1, 576, dtype=U8),
        ValueError,
        (
            "last dim must be the bytes of a token, 656 (V32: 512 e4m3, 4 fp32 scales, 64 bf16) or "
            "584 (MODEL1: 448 e4m3, 64 bf16, 7 e8m0 scales and a pad byte), got 576"
        ),
    ),
    (
        "kv_cache",
        torch.zeros(BLOCKS, PAGE, 2, 656, dtype=U8),
        ValueError,
        "h_kv (dim 2) must be 1, MLA has one KV head, got 2",
    ),
    (
        "kv_cache",
        torch.zeros(BLOCKS, 0, 1, 656, dtype=U8),
        ValueError,
        "page_block_size (dim 1) must be at least 1, got 0",
    ),
    (
        "kv_cache",
        torch.zeros(0, PAGE, 1, 656, dtype=U8),
        ValueError,
        "num_blocks (dim 0) must be at least 1 for a non-empty batch, got 0",
    ),
    (
        "kv_cache",
        torch.zeros(1, 64, 1, 656, dtype=U8).expand(2**25, 64, 1, 656),
        ValueError,
        (
            "num_blocks * page_block_size must be at most 2147483647, the reach of an int32 index, "
            "got 33554432 * 64 = 2147483648"
        ),
    ),
    (
        "kv_cache",
        torch.zeros(BLOCKS, PAGE, 1, 1312, dtype=U8)[..., ::2],
        ValueError,
        "last dim must be contiguous (stride 1), got stride 2",
    ),
    (
        "kv_cache",
        strided((BLOCKS, PAGE, 1, 656), (8000, 672, 656, 1), U8),
        ValueError,
        "token stride (dim 1) must be 656 bytes, got 672",
    ),
    (
        "kv_cache",
        strided((BLOCKS, PAGE, 1, 656), (PAGE * 656 + 8, 656, 656, 1), U8),
        ValueError,
        "page stride (dim 0) must be a multiple of 16 bytes, got 4600",
    ),
    (
        "kv_cache",
        strided((BLOCKS, PAGE, 1, 656), (PAGE * 656, 656, 656, 1), U8, offset=1),
        ValueError,
        "first element must be 16-byte aligned, got an address 1 bytes past one",
    ),
    (
        "kv_cache",
        torch.zeros(BLOCKS, PAGE, 1, 656, dtype=U8).to("meta"),
        ValueError,
        "must be on the device of q (cpu), got meta",
    ),
    # indices
    ("indices", [[[0]]], TypeError, "must be a torch.Tensor, got list"),
    (
        "indices",
        torch.zeros(B, S_Q, TOPK, dtype=torch.int64),
        TypeError,
        "dtype must be int32, got torch.int64",
    ),
    ("indices", torch.zeros(B, TOPK, dtype=I32), ValueError, "must have 3 dims [b, s_q, topk], got shape [2, 5]"),
    (
        "indices",
        torch.zeros(B, S_Q + 1, TOPK, dtype=I32),
        ValueError,
        "shape must be [b, s_q, topk] with b 2, s_q 3 of q, got [2, 4, 5]",
    ),
    (
        "indices",
        torch.zeros(B + 1, S_Q, TOPK, dtype=I32),
        ValueError,
        "shape must be [b, s_q, topk] with b 2, s_q 3 of q, got [3, 3, 5]",
    ),
    ("indices", torch.zeros(B, S_Q, 0, dtype=I32), ValueError, "topk (dim 2) must be at least 1, got 0"),
    (
        "indices",
        torch.zeros(B, TOPK, S_Q, dtype=I32).mT,
        ValueError,
        "last dim must be contiguous (stride 1), got stride 3",
    ),
    (
        "indices",
        torch.zeros(B, S_Q, TOPK, dtype=I32).to("meta"),
        ValueError,
        "must be on the device of q (cpu), got meta",
    ),
    # topk_length
    ("topk_length", 5, TypeError, "must be a torch.Tensor, got int"),
    ("topk_length", torch.zeros(B, dtype=torch.int64), TypeError, "dtype must be int32, got torch.int64"),
    ("topk_length", torch.zeros(B, S_Q, dtype=I32), ValueError, "must have 1 dim [b], got shape [2, 3]"),
    ("topk_length", torch.zeros(B + 1, dtype=I32), ValueError, "shape must be [b] = [2], got [3]"),
    ("topk_length", torch.zeros(2 * B, dtype=I32)[::2], ValueError, "must be contiguous (stride 1), got stride 2"),
    (
        "topk_length",
        torch.zeros(B, dtype=I32, device="meta"),
        ValueError,
        "must be on the device of q (cpu), got meta",
    ),
    # attn_sink
    ("attn_sink", [0.0] * H_Q, TypeError, "must be a torch.Tensor, got list"),
    ("attn_sink", torch.zeros(H_Q, dtype=BF16), TypeError, "dtype must be float32, got torch.bfloat16"),
    ("attn_sink", torch.zeros(1, H_Q), ValueError, "must have 1 dim [h_q], got shape [1, 4]"),
    ("attn_sink", torch.zeros(64), ValueError, "shape must be [h_q] = [4], got [64]"),
    ("attn_sink", torch.zeros(1).expand(H_Q), ValueError, "must be contiguous (stride 1), got stride 0"),
    ("attn_sink", torch.zeros(H_Q, device="meta"), ValueError, "must be on the device of q (cpu), got meta"),
    (
        "attn_sink",
        torch.zeros(H_Q, requires_grad=True),
        ValueError,
        (
            "must not require grad: sparse_decode has no backward, call it under torch.no_grad() or pass "
            "attn_sink.detach(), got requires_grad=True"
        ),
    ),
    # softmax_scale
    ("softmax_scale", torch.tensor(0.1), TypeError, "must be a Python float, got torch.Tensor"),
    ("softmax_scale", "0.1", TypeError, "must be a Python float, got str"),
    ("softmax_scale", True, TypeError, "must be a Python float, got bool"),
    *(
        (
            "softmax_scale",
            scale,
            ValueError,
            f"must be positive and finite in fp32 (1.17549e-38 to 1.06338e+37), got {scale}",
        )
        for scale in (0.0, -0.1, 0, float("nan"), float("inf"), 1e39, 1e-40)
    ),
    # out
    ("out", "out", TypeError, "must be a torch.Tensor, got str"),
    ("out", torch.zeros(B, S_Q, H_Q, 512), TypeError, "dtype must be bfloat16, got torch.float32"),
    ("out", q_like(B * S_Q, H_Q, 512), ValueError, "must have 4 dims [b, s_q, h_q, d_v], got shape [6, 4, 512]"),
    (
        "out",
        q_like(B, S_Q, H_Q, 576),
        ValueError,
        "shape must be [b, s_q, h_q, d_v] = [2, 3, 4, 512], got [2, 3, 4, 576]",
    ),
    (
        "out",
        q_like(B, H_Q, S_Q, 512),
        ValueError,
        "shape must be [b, s_q, h_q, d_v] = [2, 3, 4, 512], got [2, 4, 3, 512]",
    ),
    ("out", q_like(B, S_Q, 512, H_Q).mT, ValueError, "last dim must be contiguous (stride 1), got stride 4"),
    (
        "out",
        strided((B, S_Q, H_Q, 512), (8000, 2400, 516, 1), BF16),
        ValueError,
        "stride of dim 2 must be a multiple of 16 bytes (8 elements), got 516 elements",
    ),
    (
        "out",
        strided((B, S_Q, H_Q, 512), (S_Q * H_Q * 512, H_Q * 512, 512, 1), BF16, offset=1),
        ValueError,
        "first element must be 16-byte aligned, got an address 2 bytes past one",
    ),
    (
        "out",
        q_like(1, S_Q, H_Q, 512).expand(B, -1, -1, -1),
        ValueError,
        "elements must not share memory, got shape [2, 3, 4, 512] with strides [0, 2048, 512, 1]",
    ),
    (
        "out",
        q_like(B, S_Q, H_Q, 512).to("meta"),
        ValueError,
        "must be on the device of q (cpu), got meta",
    ),
    # lse
    ("lse", 1.0, TypeError, "must be a torch.Tensor, got float"),
    ("lse", torch.zeros(B, S_Q, H_Q, dtype=BF16), TypeError, "dtype must be float32, got torch.bfloat16"),
    ("lse", torch.zeros(B, S_Q), ValueError, "must have 3 dims [b, s_q, h_q], got shape [2, 3]"),
    ("lse", torch.zeros(B, H_Q, S_Q), ValueError, "shape must be [b, s_q, h_q] = [2, 3, 4], got [2, 4, 3]"),
    (
        "lse",
        torch.zeros(B, H_Q, S_Q).mT,
        ValueError,
        "last dim must be contiguous (stride 1), got stride 3",
    ),
    (
        "lse",
        torch.zeros(B, 1, H_Q).expand(-1, S_Q, -1),
        ValueError,
        "elements must not share memory, got shape [2, 3, 4] with strides [4, 0, 1]",
    ),
    ("lse", torch.zeros(B, S_Q, H_Q, device="meta"), ValueError, "must be on the device of q (cpu), got meta"),
]


@pytest.mark.parametrize("name, value, error, message", BAD, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BAD)])
def test_bad_argument(name, value, error, message):
    check(good())  # what passed before must not hide what comes now
    with pytest.raises(error, match=f"^{re.escape(f'{name}: {message}')}$"):
        check(good(**{name: value}))


BAD_EXTRA = [
    ("extra_kv_cache", {"extra_kv_cache": None}, ValueError, "must be given with extra_indices, got None"),
    (
        "extra_kv_cache",
        {"extra_kv_cache": None, "extra_indices": None},
        ValueError,
        "must be given with extra_topk_length, got None",
    ),
    ("extra_indices", {"extra_indices": None}, ValueError, "must be given with extra_kv_cache, got None"),
    ("extra_kv_cache", {"extra_kv_cache": "cache"}, TypeError, "must be a torch.Tensor, got str"),
    (
        "extra_kv_cache",
        {"extra_kv_cache": torch.zeros(3, 9, 1, 656)},
        TypeError,
        "dtype must be uint8 or int8 or float8_e4m3fn, got torch.float32",
    ),
    ("extra_kv_cache", {"extra_kv_cache": model1()}, ValueError, "last dim must be 656 as kv_cache's (V32), got 584 (MODEL1)"),
    (
        "extra_kv_cache",
        {"extra_kv_cache": torch.zeros(0, 9, 1, 656, dtype=U8)},
        ValueError,
        "num_blocks (dim 0) must be at least 1 for a non-empty batch, got 0",
    ),
    (
        "extra_kv_cache",
        {"extra_kv_cache": strided((3, 9, 1, 656), (8000, 672, 656, 1), U8)},
        ValueError,
        "token stride (dim 1) must be 656 bytes, got 672",
    ),
    (
        "extra_kv_cache",
        {"extra_kv_cache": strided((3, 9, 1, 656), (9 * 656 + 8, 656, 656, 1), U8)},
        ValueError,
        "page stride (dim 0) must be a multiple of 16 bytes, got 5912",
    ),
    (
        "extra_kv_cache",
        {"extra_kv_cache": torch.zeros(3, 9, 1, 656, dtype=U8, device="meta")},
        ValueError,
        "must be on the device of q (cpu), got meta",
    ),
    (
        "extra_indices",
        {"extra_indices": torch.zeros(B, S_Q, 11)},
        TypeError,
        "dtype must be int32, got torch.float32",
    ),
    (
        "extra_indices",
        {"extra_indices": torch.zeros(B, S_Q + 1, 11, dtype=I32)},
        ValueError,
        "shape must be [b, s_q, extra_topk] with b 2, s_q 3 of q, got [2, 4, 11]",
    ),
    (
        "extra_indices",
        {"extra_indices": torch.zeros(B, S_Q, 0, dtype=I32)},
        ValueError,
        "extra_topk (dim 2) must be at least 1, got 0",
    ),
    (
        "extra_indices",
        {"extra_indices": torch.zeros(B, 11, S_Q, dtype=I32).mT},
        ValueError,
        "last dim must be contiguous (stride 1), got stride 3",
    ),
    (
        "extra_topk_length",
        {"extra_topk_length": torch.zeros(B)},
        TypeError,
        "dtype must be int32, got torch.float32",
    ),
    (
        "extra_topk_length",
        {"extra_topk_length": torch.zeros(B + 1, dtype=I32)},
        ValueError,
        "shape must be [b] = [2], got [3]",
    ),
    (
        "extra_topk_length",
        {"extra_topk_length": torch.zeros(2 * B, dtype=I32)[::2]},
        ValueError,
        "must be contiguous (stride 1), got stride 2",
    ),
    (
        "extra_topk_length",
        {"extra_topk_length": torch.zeros(B, dtype=I32, device="meta")},
        ValueError,
        "must be on the device of q (cpu), got meta",
    ),
    (
        "q",
        {"kv_cache": model1(), "extra_kv_cache": model1()},
        ValueError,
        "last dim d_qk must be 512 (MODEL1: 448 latent + 64 RoPE values), got 576",
    ),
    (
        "kv_cache",
        {"q": q_like(B, S_Q, H_Q, 512), "kv_cache": model1(stride=PAGE * 584)},
        ValueError,
        f"page stride (dim 0) must be a multiple of 16 bytes, got {PAGE * 584}",
    ),
    (
        "kv_cache",
        {"q": q_like(B, S_Q, H_Q, 512), "kv_cache": strided((BLOCKS, PAGE, 1, 584), (PAGE * 576, 576, 576, 1), U8)},
        ValueError,
        "token stride (dim 1) must be 584 bytes, got 576",
    ),
]


@pytest.mark.parametrize("name, changes, error, message", BAD_EXTRA, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD_EXTRA)])
def test_bad_extra(name, changes, error, message):
    check(good_extra())
    with pytest.raises(error, match=f"^{re.escape(f'{name}: {message}')}$"):
        check(good_extra(**changes))


def test_extra_cache_that_requires_grad():
    args = good_extra(extra_kv_cache=torch.zeros(3, 9, 1, 656).to(torch.float8_e4m3fn))
    for _ in range(2):
        check(args)
    args["extra_kv_cache"].requires_grad_()
    with pytest.raises(ValueError, match="^extra_kv_cache: must not require grad"):
        check(args)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["q", "topk_length", "attn_sink", "lse"])
def test_nested_tensor(name):
    """It calls itself strided, and has no shape."""
    nested = torch.nested.nested_tensor(list(good()[name]))
    with pytest.raises(TypeError, match=rf"^{name}: must be a dense \(strided\) tensor, got a nested tensor$"):
        check(good(**{name: nested}))


@pytest.mark.parametrize("name", ["q", "attn_sink", "out", "lse"])
def test_requires_grad(name):
    args = good()
    check(args)
    args[name].requires_grad_()
    message = re.escape(f"{name}: must not require grad: sparse_decode has no backward")
    with pytest.raises(ValueError, match=f"^{message}.*got requires_grad=True$"):
        check(args)
    with torch.no_grad():
        assert check(args).h_q == H_Q
    with torch.inference_mode():
        assert check(args).h_q == H_Q


def test_same_metadata_is_checked_once(monkeypatch):
    calls = []
    inner = validate._check_sparse_decode
    monkeypatch.setattr(validate, "_passed", {})
    monkeypatch.setattr(validate, "_last", (None, None))
    monkeypatch.setattr(validate, "_check_sparse_decode", lambda *args: calls.append(args) or inner(*args))
    first = check(good())
    assert check(good()) is first
    assert check(good(softmax_scale=0.3)) is first
    assert len(calls) == 1
    changed = check(good(topk_length=None))
    assert (len(calls), changed.has_topk_length) == (2, False)
    assert check(good(kv_cache=torch.zeros(9, PAGE, 1, 656, dtype=U8))) is not first  # one object per metadata
    assert len(calls) == 3
    extra = check(good_extra())
    assert (len(calls), extra.has_extra) == (4, True)
    assert check(good_extra()) is extra and check(good()) is first
    assert len(calls) == 4
    wide = torch.zeros(3, 8, 1, 656, dtype=U8), torch.zeros(B, S_Q, 12, dtype=I32)
    assert check(good_extra(extra_kv_cache=wide[0])) is not check(good_extra(extra_indices=wide[1])) is not extra
    assert not check(good_extra(extra_topk_length=None)).has_extra_topk_length
    assert len(calls) == 7


@pytest.mark.parametrize(
    "name, dtype, offset", [("q", BF16, 1), ("kv_cache", U8, 8), ("out", BF16, 4), ("extra_kv_cache", U8, 8)]
)
def test_address_is_looked_at_every_time(name, dtype, offset):
    args = good_extra()
    check(args)
    shape, stride = args[name].shape, args[name].stride()
    args[name] = strided(shape, stride, dtype, offset)
    with pytest.raises(ValueError, match=f"^{name}: first element must be 16-byte aligned"):
        check(args)


@pytest.mark.parametrize("passed_before", [False, True])
@pytest.mark.parametrize("name", ["indices", "topk_length", "attn_sink", "lse", "extra_indices", "extra_topk_length"])
def test_words_are_aligned(name, passed_before, monkeypatch):
    monkeypatch.setattr(validate, "_passed", {})
    monkeypatch.setattr(validate, "_last", (None, None))
    args = good_extra()
    if passed_before:
        check(args)
    t = args[name]
    args[name] = torch.frombuffer(bytearray(4 * t.numel() + 2), dtype=t.dtype, offset=2, count=t.numel()).view(t.shape)
    off = args[name].data_ptr() % 4
    assert off
    with pytest.raises(ValueError, match=f"^{name}: first element must be 4-byte aligned, got an address {off} bytes"):
        check(args)


def overlapping():
    """(output, the other argument, arguments in which they share bytes)"""
    args = good()
    yield "lse", "out", args | {"lse": args["out"].view(F32)[:, :, 0, :H_Q]}
    yield "out", "q", args | {"out": args["q"][..., :512]}
    yield "out", "q", args | {"out": args["q"][..., 64:]}
    words = torch.zeros(BLOCKS * PAGE * 656 // 4, dtype=I32)  # the cache's bytes, under other names
    args = good(kv_cache=words.view(U8).view(BLOCKS, PAGE, 1, 656))
    yield "out", "kv_cache", args | {"out": words.view(BF16)[: B * S_Q * H_Q * 512].view(B, S_Q, H_Q, 512)}
    yield "lse", "kv_cache", args | {"lse": words.view(F32)[-B * S_Q * H_Q :].view(B, S_Q, H_Q)}
    lse = torch.zeros(B, S_Q, 2 * H_Q)
    yield "lse", "attn_sink", good(lse=lse[..., :H_Q], attn_sink=lse[0, 0, H_Q:])  # in a gap: that counts too
    yield "lse", "topk_length", good(lse=lse[..., :H_Q], topk_length=lse[0, 0, :B].view(I32))
    yield "lse", "indices", good(lse=lse[..., :H_Q], indices=lse.view(I32)[..., 1 : 1 + TOPK])
    yield "lse", "extra_indices", good_extra(lse=lse[..., :H_Q], extra_indices=lse.view(I32)[..., 1 : 1 + TOPK])
    yield "lse", "extra_topk_length", good_extra(lse=lse[..., :H_Q], extra_topk_length=lse[0, 0, :B].view(I32))
    words = torch.zeros(3 * 9 * 656 // 4, dtype=I32)
    args = good_extra(extra_kv_cache=words.view(U8).view(3, 9, 1, 656))
    out = args["extra_kv_cache"].view(-1)[-B * S_Q * H_Q * 4 :].view(F32).view(B, S_Q, H_Q)
    yield "lse", "extra_kv_cache", args | {"lse": out}
    room = torch.zeros(B * S_Q * H_Q * 512, dtype=BF16)
    args = good_extra(out=room.view(B, S_Q, H_Q, 512))
    yield "out", "extra_kv_cache", args | {"extra_kv_cache": room.view(U8)[: 3 * 656].view(3, 1, 1, 656)}


@pytest.mark.parametrize("passed_before", [False, True])
@pytest.mark.parametrize("name, other, args", list(overlapping()))
def test_outputs_overlap_nothing(name, other, args, passed_before, monkeypatch):
    monkeypatch.setattr(validate, "_passed", {})
    monkeypatch.setattr(validate, "_last", (None, None))
    if passed_before:  # the same metadata at other addresses
        apart = {
            k: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for k, t in args.items() if k != "softmax_scale"
        }
        check(args | apart)
    with pytest.raises(
        ValueError, match=rf"^{name}: must not overlap {other} from first to last byte, got \d+ bytes at 0x"
    ):
        check(args)


def test_neighbours_do_not_overlap():
    room = torch.zeros(2 * B * S_Q * H_Q * 512, dtype=BF16)
    out, rest = room.view(2, B, S_Q, H_Q, 512)
    lse = rest.view(F32).flatten()[: B * S_Q * H_Q].view(B, S_Q, H_Q)
    sink = rest.view(F32).flatten()[B * S_Q * H_Q :][:H_Q]
    for _ in range(2):
        assert check(good(out=out, lse=lse, attn_sink=sink)).h_q == H_Q
        same = torch.zeros(H_Q)  # arguments that are only read may share memory
        assert check(good(attn_sink=same, topk_length=same.view(I32)[:B])).h_q == H_Q
    x = torch.zeros(0, S_Q, H_Q, 576, dtype=BF16)
    empty = {"q": x, "out": x[..., :512], "lse": torch.zeros(0, S_Q, H_Q), "topk_length": torch.zeros(0, dtype=I32)}
    for _ in range(2):
        assert check(good(**empty, indices=torch.zeros(0, S_Q, TOPK, dtype=I32))).h_q == H_Q


def test_memo_is_bounded(monkeypatch):
    monkeypatch.setattr(validate, "_passed", {})
    monkeypatch.setattr(validate, "_last", (None, None))
    monkeypatch.setattr(validate, "_MEMO_ENTRIES", 3)
    for blocks in range(1, 11):
        check(good(kv_cache=torch.zeros(blocks, PAGE, 1, 656, dtype=U8)))
        assert 1 <= len(validate._passed) <= 3


# ----- tensors that are like good ones in their metadata ----------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(validate, "_passed", {})
    monkeypatch.setattr(validate, "_last", (None, None))


NAMES = [name for name in good_extra() if name != "softmax_scale"]


@pytest.mark.parametrize("passed_before", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fake_tensor(name, passed_before, fresh):
    args = good_extra()
    if passed_before:
        check(args)
    other = "kv_cache" if name == "q" else "q"
    fake = FakeTensorMode().from_tensor(args[name])
    for _ in range(2):
        with pytest.raises(TypeError, match=f"^{name}: must be a tensor with memory as {other} is, got a FakeTensor$"):
            check(args | {name: fake})
    assert check(args).h_q == H_Q


def test_all_fake_are_of_a_graph(fresh):
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(t) if name in NAMES else t for name, t in good_extra().items()}
    assert check(fakes) is None and not validate._passed


@pytest.mark.parametrize("passed_before", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_freed_storage(name, passed_before, fresh):
    args = good_extra()
    if passed_before:
        check(args)
    args[name].untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{name}: must have memory, got a torch.Tensor of \d+ bytes at address 0$"):
            check(args)


@pytest.mark.parametrize("passed_before", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_negative_view(name, passed_before, fresh):
    args = good_extra()
    if passed_before:
        check(args)
    args[name] = torch._neg_view(args[name])
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"^{name}: must hold its values \(resolve_neg\(\)\), got a negative view$"):
            check(args)


@pytest.mark.parametrize("passed_before", [False, True])
@pytest.mark.parametrize("name", ["q", "indices", "attn_sink"])
def test_transforms(name, passed_before, fresh):
    args = good()
    if passed_before:
        check(args)
    message = rf"^{name}: must be outside of torch.func's transforms \(vmap, grad, jvp\)"
    with pytest.raises(TypeError, match=message):
        torch.vmap(lambda t: check(args | {name: t}))(args[name].expand(2, *args[name].shape))
    if args[name].is_floating_point():
        with pytest.raises(TypeError, match=message):
            torch.func.jvp(lambda t: check(args | {name: t}), (args[name],), (args[name],))
    # beside one, with tensors that it does not wrap
    torch.vmap(lambda t: check(args) and t)(torch.zeros(2))


@pytest.mark.parametrize("passed_before", [False, True])
def test_jit_trace(passed_before, fresh):
    args = good()
    if passed_before:
        check(args)
    with pytest.raises(TypeError, match=r"^q: must not be traced by torch.jit.trace \(torch.compile and"):
        torch.jit.trace(lambda q: check(args | {"q": q}), (args["q"],))
    assert check(args).h_q == H_Q


def test_one_tensor_for_two_arguments(fresh, monkeypatch):
    """It is looked up like any other."""
    args = good_extra()
    args["extra_topk_length"] = args["topk_length"]
    first = check(args)
    monkeypatch.setattr(validate, "_check_sparse_decode", None)
    assert check(args) is first
    args["topk_length"] = args["extra_topk_length"] = torch.zeros(B, dtype=I32)
    assert check(args) is first


def test_empty_batch_is_looked_up(fresh, monkeypatch):
    x = torch.zeros(0, S_Q, H_Q, 576, dtype=BF16)
    args = good(q=x, indices=torch.zeros(0, S_Q, TOPK, dtype=I32), topk_length=None, out=None, lse=None)
    first = check(args)
    monkeypatch.setattr(validate, "_check_sparse_decode", None)
    assert check(args) is first


def test_modes_keep_the_problem(fresh):
    """Another mode of torch is another check, not another problem."""
    args = good()
    first = check(args)
    with torch.autocast("cpu"):
        assert check(args) is first
    with torch.inference_mode():
        assert check(args) is first
    assert check(args | {"attn_sink": torch.nn.Parameter(args["attn_sink"], requires_grad=False)}) is first


def test_largest_scale():
    """Hopper's kernel multiplies it by 16 * log2(e), in fp32."""
    largest = torch.tensor(validate.SCALE_MAX, dtype=F32)
    assert check(good(softmax_scale=validate.SCALE_MAX)).h_q == H_Q
    assert (largest * torch.tensor(1.4426950408889634) * 16).isfinite()
    for _ in range(2):
        with pytest.raises(ValueError, match="^softmax_scale: must be positive and finite in fp32 .*, got 3e"):
            check(good(softmax_scale=3e37))
