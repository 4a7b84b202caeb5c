"""Values that come from memory nobody wrote. They may be loaded and thrown away, but not be used.

A `Tainted` array takes the place of a register's plain one, and arithmetic on it gives tainted results: only lanes that
depend on it, and a select that takes the other side is clean. Code that never meets such memory pays nothing.
"""

from __future__ import annotations

import numpy as np


class Tainted(np.ndarray):
    """An array with `taint` [same shape] bool, and the `origin` of it: a text for the finding."""

    taint: np.ndarray
    origin: str

    def __array_finalize__(self, other):
        # For what is not said more exactly below: all of it.
        self.taint, self.origin = np.ones(self.shape, bool), getattr(other, "origin", "")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        result = getattr(ufunc, method)(*[plain(x) for x in inputs], **kwargs)
        if method != "__call__":
            return result
        if isinstance(result, tuple):
            return tuple(self._of(r, inputs) for r in result)
        return self._of(result, inputs)

    def __array_function__(self, function, types, args, kwargs):
        result = function(*_plain_all(args), **{k: plain(v) for k, v in kwargs.items()})
        if function is np.where and len(args) == 3:
            condition, a, b = args
            taint = np.where(plain(condition), taint_of(a), taint_of(b)) | taint_of(condition)
            return tainted(result, taint, self.origin)
        if function in (np.stack, np.concatenate):
            axis = kwargs.get("axis", args[1] if len(args) > 1 else 0)
            items = args[0]
            taints = [np.broadcast_to(taint_of(x), np.shape(x)) for x in items]
            return tainted(result, function(taints, axis=axis), self.origin)
        if function is np.broadcast_to:
            return tainted(result, np.broadcast_to(self.taint, result.shape), self.origin)
        if isinstance(result, np.ndarray) and result.shape == self.shape:
            return tainted(result, self.taint, self.origin)
        return result

    def _of(self, result, inputs):
        taint = np.zeros((), bool)
        for x in inputs:
            taint = taint | taint_of(x)
        return tainted(result, np.broadcast_to(taint, np.shape(result)), self.origin)

    def view(self, dtype=None):
        result = plain(self).view(dtype)
        if result.shape == self.shape:
            return tainted(result, self.taint, self.origin)
        if result.shape[-1] > self.shape[-1]:
            return tainted(result, np.repeat(self.taint, result.shape[-1] // self.shape[-1], -1), self.origin)
        parts = self.taint.reshape(*result.shape, -1)
        return tainted(result, parts.any(-1), self.origin)

    def astype(self, dtype, copy=True):
        return tainted(plain(self).astype(dtype, copy=copy), self.taint, self.origin)

    def reshape(self, *shape):
        return tainted(plain(self).reshape(*shape), self.taint.reshape(*shape), self.origin)

    def copy(self):
        return tainted(plain(self).copy(), self.taint, self.origin)

    def __getitem__(self, key):
        result = plain(self)[key]
        return tainted(result, self.taint[key], self.origin) if isinstance(result, np.ndarray) else result


def tainted(values: np.ndarray, taint: np.ndarray, origin: str) -> np.ndarray:
    """`values` with a taint; as they are when there is none."""
    if not taint.any():
        return values
    result = np.ascontiguousarray(values).view(Tainted)
    result.taint, result.origin = taint, origin
    return result


def plain(x):
    return np.ndarray.view(x, np.ndarray) if type(x) is Tainted else x


def _plain_all(args):
    return [[plain(y) for y in x] if isinstance(x, (list, tuple)) else plain(x) for x in args]


def taint_of(x) -> np.ndarray:
    return x.taint if type(x) is Tainted else np.zeros((), bool)
