# cython: cdivision=True
"""The functions of ``small_numpy.py`` as loops in C, for small arrays of float32 in C order; others go there.

Each operation is rounded as NumPy rounds it (no fused multiply-add), so that the results are the same bit for bit. What
takes a function of its own (exp, log) or depends on the order of a sum stays with NumPy. Products are those of NumPy's
own BLAS, called without what NumPy does around them, which takes twice as long as the product of 8 by 8.
"""

import ctypes
import sys

import numpy as np

from dbrdist.kernels.small_arrays import small_numpy

from libc.string cimport memset

cdef extern from "../array_fields.h":
    ctypedef struct ArrayFields:
        char *data
        int nd
        Py_ssize_t *dimensions
        Py_ssize_t *strides
        void *descr
        int flags

cdef enum:
    ALIGNED = 0x100
    IN_C_ORDER = 0x1 | ALIGNED
    TO_WRITE = IN_C_ORDER | 0x400
    LARGE = 1 << 12  # elements from which on NumPy's wider instructions count

cdef enum:  # of CBLAS
    BY_ROWS = 101
    AS_IT_LIES = 111
    TURNED = 112

ctypedef long long Label
ctypedef long long Length
ctypedef void (*Gemm)(
    int, int, int, Length, Length, Length, float, float *, Length, float *, Length, float, float *, Length
) noexcept
ctypedef void (*Gemv)(
    int, int, Length, Length, float, float *, Length, float *, Length, float, float *, Length
) noexcept

cdef Gemm gemm = NULL
cdef Gemv gemv = NULL

cdef object ndarray = np.ndarray
cdef object empty = np.empty
cdef object float32 = np.dtype(np.float32)
cdef object int64 = np.dtype(np.int64)
cdef float SMALL_LOSS = small_numpy.SMALL_LOSS
cdef double THIRD = small_numpy.THIRD
cdef double FIFTH = small_numpy.FIFTH
cdef double SEVENTH = small_numpy.SEVENTH


cdef ArrayFields *plain(object a, object dtype, int nd, int flags):
    """The fields of an array of this type, number of axes and flags, if it is small; else NULL."""
    if type(a) is not ndarray:
        return NULL
    cdef ArrayFields *found = <ArrayFields *> <void *> a
    if found.descr != <void *> dtype or found.nd != nd or found.flags & flags != flags:
        return NULL
    return found if size(found) <= LARGE else NULL


cdef Py_ssize_t size(ArrayFields *a):
    cdef Py_ssize_t n = 1
    cdef int i
    for i in range(a.nd):
        n *= a.dimensions[i]
    return n


cdef bint agree(ArrayFields *a, ArrayFields *b):
    """Whether two arrays have the same shape and strides."""
    cdef int i
    if a.nd != b.nd:
        return False
    for i in range(a.nd):
        if a.dimensions[i] != b.dimensions[i] or a.strides[i] != b.strides[i]:
            return False
    return True


cdef ArrayFields *matrix(object a):
    """As plain() of (2 or more, 2 or more) where BLAS is there: for vectors NumPy calls other functions of it."""
    if gemm is NULL:
        return NULL
    cdef ArrayFields *found = plain(a, float32, 2, IN_C_ORDER)
    return NULL if found is NULL or found.dimensions[0] < 2 or found.dimensions[1] < 2 else found


cdef float *room(object y, Py_ssize_t num_rows, Py_ssize_t num_columns, ArrayFields *a, ArrayFields *b):
    """Zeros in y, (num_rows, num_columns) in C order apart from a and b; NULL where it is something else.

    With no rows it has one axis.
    """
    cdef int nd = 2 if num_rows else 1
    cdef ArrayFields *to = plain(y, float32, nd, TO_WRITE)
    if to is NULL or to.dimensions[nd - 1] != num_columns or (num_rows and to.dimensions[0] != num_rows):
        return NULL
    cdef char *end = to.data + size(to) * sizeof(float)
    if (to.data < a.data + size(a) * sizeof(float) and a.data < end) or (
        to.data < b.data + size(b) * sizeof(float) and b.data < end
    ):
        return NULL
    memset(to.data, 0, end - to.data)
    return <float *> to.data


cdef bint are_finite(float *values, Py_ssize_t n) noexcept:
    """Whether NumPy has nothing to warn of: infinity less itself is NaN."""
    cdef float total = 0
    cdef Py_ssize_t i
    for i in range(n):
        total += values[i] - values[i]
    return total == 0


def rows_times(x, W, b, spread):
    cdef ArrayFields *left = matrix(x)
    cdef ArrayFields *right = matrix(W)
    cdef ArrayFields *row = NULL if b is None else plain(b, float32, 1, IN_C_ORDER)
    if left is NULL or right is NULL or left.dimensions[1] != right.dimensions[1] or left.data == right.data:
        return small_numpy.rows_times(x, W, b, spread)
    cdef Length m = left.dimensions[0], n = right.dimensions[0], k = left.dimensions[1]
    if b is not None and (row is NULL or row.dimensions[0] != n):
        return small_numpy.rows_times(x, W, b, spread)
    y = empty((m, n), float32)
    cdef float *out = room(y, m, n, left, right)
    if out is NULL:
        return small_numpy.rows_times(x, W, b, spread)
    gemm(BY_ROWS, AS_IT_LIES, TURNED, m, n, k, 1, <float *> left.data, k, <float *> right.data, k, 0, out, n)
    cdef float *bias
    cdef float *result = out
    cdef Py_ssize_t i, j
    if row is not NULL:
        bias = <float *> row.data
        for i in range(m):
            for j in range(n):
                out[j] += bias[j]
            out += n
    return y if are_finite(result, m * n) else small_numpy.rows_times(x, W, b, spread)


def times(a, b):
    cdef ArrayFields *left = matrix(a)
    cdef ArrayFields *right = matrix(b)
    if left is NULL or right is NULL or left.dimensions[1] != right.dimensions[0]:
        return small_numpy.times(a, b)
    cdef Length m = left.dimensions[0], n = right.dimensions[1], k = left.dimensions[1]
    y = empty((m, n), float32)
    cdef float *out = room(y, m, n, left, right)
    if out is NULL:
        return small_numpy.times(a, b)
    gemm(BY_ROWS, AS_IT_LIES, AS_IT_LIES, m, n, k, 1, <float *> left.data, k, <float *> right.data, n, 0, out, n)
    return y if are_finite(out, m * n) else small_numpy.times(a, b)


def turned_times(a, b, out=None):
    cdef ArrayFields *left = matrix(a)
    cdef ArrayFields *right = matrix(b)
    if left is NULL or right is NULL or left.dimensions[0] != right.dimensions[0] or left.data == right.data:
        return small_numpy.turned_times(a, b, out)
    cdef Length m = left.dimensions[1], n = right.dimensions[1], k = left.dimensions[0]
    y = empty((m, n), float32) if out is None else out
    cdef float *to = room(y, m, n, left, right)
    if to is NULL:
        return small_numpy.turned_times(a, b, out)
    gemm(BY_ROWS, TURNED, AS_IT_LIES, m, n, k, 1, <float *> left.data, m, <float *> right.data, n, 0, to, n)
    return y if are_finite(to, m * n) else small_numpy.turned_times(a, b, out)


def weighted_rows(weights, a, out=None):
    cdef ArrayFields *by = plain(weights, float32, 1, IN_C_ORDER)
    cdef ArrayFields *rows = matrix(a)
    if by is NULL or rows is NULL or by.dimensions[0] != rows.dimensions[0]:
        return small_numpy.weighted_rows(weights, a, out)
    cdef Length k = rows.dimensions[0], n = rows.dimensions[1]
    y = empty(n, float32) if out is None else out
    cdef float *to = room(y, 0, n, by, rows)
    if to is NULL:
        return small_numpy.weighted_rows(weights, a, out)
    gemv(BY_ROWS, TURNED, k, n, 1, <float *> rows.data, n, <float *> by.data, 1, 0, to, 1)
    return y if are_finite(to, n) else small_numpy.weighted_rows(weights, a, out)


def masked(y, gy):
    cdef ArrayFields *passed = plain(y, float32, 2, IN_C_ORDER)
    cdef ArrayFields *given = plain(gy, float32, 2, IN_C_ORDER)
    if passed is NULL or given is NULL or not agree(passed, given):
        return small_numpy.masked(y, gy)
    gx = empty((given.dimensions[0], given.dimensions[1]), float32)
    cdef float *mask = <float *> passed.data
    cdef float *g = <float *> given.data
    cdef float *out = <float *> (<ArrayFields *> <void *> gx).data
    cdef Py_ssize_t i
    for i in range(size(passed)):
        out[i] = g[i] if mask[i] != 0 else 0
    return gx


cdef bint lies_as_images(ArrayFields *a):
    """Whether (N, C, H, W) lies in one piece, channels last."""
    cdef Py_ssize_t step = sizeof(float)
    cdef int axis
    for axis in (1, 3, 2, 0):
        if a.dimensions[axis] != 1 and a.strides[axis] != step:
            return False
        step *= a.dimensions[axis]
    return True


def masked_images(y, gy):
    cdef ArrayFields *passed = plain(y, float32, 4, ALIGNED)
    cdef ArrayFields *given = plain(gy, float32, 4, ALIGNED)
    if passed is NULL or given is NULL or not agree(passed, given) or not lies_as_images(given):
        return small_numpy.masked_images(y, gy)
    gx = gy.copy("K")
    cdef float *mask = <float *> passed.data
    cdef float *g = <float *> given.data
    cdef float *out = <float *> (<ArrayFields *> <void *> gx).data
    cdef Py_ssize_t i, n = size(given)
    cdef int num_nan = 0
    for i in range(n):
        out[i] = g[i] * <float> (mask[i] != 0)
        num_nan += out[i] != out[i]
    if num_nan:
        for i in range(n):
            out[i] = g[i] if mask[i] != 0 else 0
    return gx


def are_classes(t, Py_ssize_t num_classes):
    cdef ArrayFields *labels = plain(t, int64, 1, IN_C_ORDER)
    if labels is NULL:
        return small_numpy.are_classes(t, num_classes)
    cdef Label *label = <Label *> labels.data
    cdef Py_ssize_t i
    for i in range(labels.dimensions[0]):
        if not 0 <= label[i] < num_classes:
            return False
    return True


def below_largest(x, t, starts, spread):
    cdef ArrayFields *scores = plain(x, float32, 2, IN_C_ORDER)
    cdef ArrayFields *labels = plain(t, int64, 1, IN_C_ORDER)
    if scores is NULL or labels is NULL or scores.dimensions[0] != labels.dimensions[0]:
        return small_numpy.below_largest(x, t, starts, spread)
    cdef Py_ssize_t i, j, num_rows = scores.dimensions[0], num_columns = scores.dimensions[1]
    below, at, losses = empty((num_rows, num_columns), float32), empty(num_rows, int64), empty(num_rows, float32)
    cdef float *score = <float *> scores.data
    cdef float *out = <float *> (<ArrayFields *> <void *> below).data
    cdef float *loss = <float *> (<ArrayFields *> <void *> losses).data
    cdef Label *label = <Label *> labels.data
    cdef Label *place = <Label *> (<ArrayFields *> <void *> at).data
    cdef float largest
    for i in range(num_rows):
        place[i] = label[i]
        if not 0 <= place[i] < num_columns:  # another thread may have changed a label after the check
            raise IndexError(f"label {place[i]} is out of bounds for {num_columns} classes")
        largest = score[0]
        for j in range(1, num_columns):
            if not score[j] <= largest:
                if largest != largest:
                    break  # the first NaN is the largest, as to argmax
                largest = score[j]
        for j in range(num_columns):
            out[j] = score[j] - largest
        loss[i] = out[place[i]]
        place[i] += i * num_columns
        out += num_columns
        score += num_columns
    return below, at, losses


def divide_by_sums(p, spread):
    cdef ArrayFields *to = plain(p, float32, 2, TO_WRITE)
    if to is NULL:
        return small_numpy.divide_by_sums(p, spread)
    total = empty(to.dimensions[0], float32)
    cdef float *out = <float *> to.data
    cdef float *sums = <float *> (<ArrayFields *> <void *> total).data
    cdef Py_ssize_t i, j, num_columns = to.dimensions[1]
    for i in range(to.dimensions[0]):
        sums[i] = sum_as_numpy(out, num_columns)
        for j in range(num_columns):
            out[j] /= sums[i]
        out += num_columns
    return total


cdef float sum_as_numpy(float *row, Py_ssize_t n) noexcept:
    """The sum of a row in the order of NumPy: eight sums side by side, and halves of more than 128 elements."""
    cdef float total = 0
    cdef float[8] sums
    cdef Py_ssize_t i, k, half
    if n < 8:
        for i in range(n):
            total += row[i]
        return total
    if n > 128:
        half = n // 2
        half -= half % 8
        return sum_as_numpy(row, half) + sum_as_numpy(row + half, n - half)
    for k in range(8):
        sums[k] = row[k]
    for i in range(8, n - n % 8, 8):
        for k in range(8):
            sums[k] += row[i + k]
    total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
    for i in range(n - n % 8, n):
        total += row[i]
    return total


def mean_cross_entropy(logs, below, p, weights):
    cdef ArrayFields *to = plain(logs, float32, 1, TO_WRITE)
    cdef ArrayFields *under = plain(below, float32, 1, IN_C_ORDER)
    cdef ArrayFields *shares = plain(p, float32, 2, IN_C_ORDER)
    if to is NULL or under is NULL or shares is NULL:
        return small_numpy.mean_cross_entropy(logs, below, p, weights)
    cdef Py_ssize_t i, n = to.dimensions[0]
    if under.dimensions[0] != n or shares.dimensions[0] != n:
        return small_numpy.mean_cross_entropy(logs, below, p, weights)
    cdef float *losses = <float *> to.data
    cdef float *distances = <float *> under.data
    for i in range(n):
        losses[i] -= distances[i]
    y = empty((), float32)
    logs.dot(weights, y)
    cdef float *mean = <float *> (<ArrayFields *> <void *> y).data
    if mean[0] < SMALL_LOSS:
        mean[0] = <float> mean_of_small(losses, <float *> shares.data, n, shares.dimensions[1])
    return y


cdef double mean_of_small(float *losses, float *p, Py_ssize_t n, Py_ssize_t num_columns) noexcept:
    cdef Py_ssize_t i, j
    cdef double share, half, square, total = 0
    for i in range(n):
        if losses[i] < SMALL_LOSS:
            share = 0
            for j in range(num_columns):
                if p[j] < 0.5:
                    share += p[j]
            half = share / (2 - share)
            square = half * half
            half *= 1 + square * (THIRD + square * (FIFTH + square * SEVENTH))
            losses[i] = <float> (half + half)
        total += losses[i]
        p += num_columns
    return total / n


def cross_entropy_gradient(p, at, gy, scale):
    cdef ArrayFields *shares = plain(p, float32, 2, IN_C_ORDER)
    cdef ArrayFields *places = plain(at, int64, 1, IN_C_ORDER)
    cdef ArrayFields *given = plain(gy, float32, 0, IN_C_ORDER)
    cdef ArrayFields *by = plain(scale, float32, 0, IN_C_ORDER)
    if shares is NULL or places is NULL or given is NULL or by is NULL:
        return small_numpy.cross_entropy_gradient(p, at, gy, scale)
    gx = empty((shares.dimensions[0], shares.dimensions[1]), float32)
    cdef float *share = <float *> shares.data
    cdef float *out = <float *> (<ArrayFields *> <void *> gx).data
    cdef Label *place = <Label *> places.data
    cdef float scaled = (<float *> given.data)[0] * (<float *> by.data)[0]
    cdef Py_ssize_t i
    for i in range(size(shares)):
        out[i] = share[i] * scaled
    for i in range(places.dimensions[0]):
        out[place[i]] -= scaled
    return gx


def momentum_sgd(p, g, v, workspace, lr, momentum):
    cdef ArrayFields *data = plain(p, float32, 1, TO_WRITE)
    cdef ArrayFields *grad = plain(g, float32, 1, IN_C_ORDER)
    cdef ArrayFields *state = plain(v, float32, 1, TO_WRITE)
    if data is NULL or grad is NULL or state is NULL or type(lr) is not float or type(momentum) is not float:
        small_numpy.momentum_sgd(p, g, v, workspace, lr, momentum)
        return
    cdef Py_ssize_t i, n = data.dimensions[0]
    if grad.dimensions[0] != n or state.dimensions[0] != n:
        small_numpy.momentum_sgd(p, g, v, workspace, lr, momentum)
        return
    cdef float *values = <float *> data.data
    cdef float *gradients = <float *> grad.data
    cdef float *speeds = <float *> state.data
    cdef float rate = lr
    cdef float kept = momentum
    for i in range(n):
        speeds[i] = kept * speeds[i] - rate * gradients[i]
        values[i] += speeds[i]


def scale_sum(terms, scale, out):
    cdef ArrayFields *to = plain(out, float32, 1, TO_WRITE)
    cdef ArrayFields *by = plain(scale, float32, 0, IN_C_ORDER)
    cdef ArrayFields *first
    cdef ArrayFields *second
    if to is NULL or by is NULL or len(terms) != 2:
        small_numpy.scale_sum(terms, scale, out)
        return
    first, second = plain(terms[0], float32, 1, IN_C_ORDER), plain(terms[1], float32, 1, IN_C_ORDER)
    cdef Py_ssize_t i, n = to.dimensions[0]
    if first is NULL or second is NULL or first.dimensions[0] != n or second.dimensions[0] != n:
        small_numpy.scale_sum(terms, scale, out)
        return
    cdef float *total = <float *> to.data
    cdef float *one = <float *> first.data
    cdef float *other = <float *> second.data
    cdef float factor = (<float *> by.data)[0]
    for i in range(n):
        total[i] = (one[i] + other[i]) * factor


def _check_fields():
    """Refuse a NumPy whose arrays have other fields."""
    a = np.arange(6, dtype=np.float32).reshape(2, 3)[:, 1:]
    cdef ArrayFields *found = <ArrayFields *> <void *> a
    address, is_read_only = a.__array_interface__["data"]
    is_same = (
        <Py_ssize_t> found.data == address and found.nd == 2 and found.dimensions[1] == 2 and found.strides[0] == 12
        and found.descr == <void *> a.dtype and found.flags & TO_WRITE == 0x500
    )
    if not is_same:
        raise ImportError("NumPy's arrays have other fields than small_loops.pyx expects")


def _find_blas():
    """Take two functions from the BLAS with which NumPy was linked, where that is one with integers of 64 bits."""
    global gemm, gemv
    of_numpy = sys.modules.get("numpy._core._multiarray_umath") or sys.modules.get("numpy.core._multiarray_umath")
    for pattern in ("scipy_cblas_{}64_", "cblas_{}64_"):  # of NumPy's wheels; the others are served by NumPy's calls
        try:
            found = ctypes.CDLL(of_numpy.__file__)
            names = [ctypes.cast(found[pattern.format(name)], ctypes.c_void_p).value for name in ("sgemm", "sgemv")]
        except (AttributeError, OSError, TypeError):
            continue
        gemm, gemv = <Gemm> <Py_ssize_t> names[0], <Gemv> <Py_ssize_t> names[1]
        return


_check_fields()
_find_blas()
