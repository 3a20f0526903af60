"""Calls of the loops in ``vector_loops.h`` on arrays of NumPy."""

import numpy as np

cdef extern from "../array_fields.h":
    ctypedef struct ArrayFields:
        char *data
        int nd
        Py_ssize_t *dimensions
        Py_ssize_t *strides
        int flags

cdef extern from "vector_loops.h" nogil:
    ctypedef void (*Loop)(void **arrays, Py_ssize_t start, Py_ssize_t stop, const double *numbers)
    ctypedef struct Entry:
        const char *name
        int num_arrays, written, num_numbers
        const char *rows
        Loop *of_double
    const Entry ENTRIES[]
    enum: NUM_ENTRIES
    enum: NUM_LEVELS
    int level
    void find_processor()
    bint is_served(const Entry *entry)
    Loop loop_of(const Entry *entry, bint is_double)
    enum: MOST_NUMBERS
    ctypedef struct Before:
        Loop loop
        double numbers[MOST_NUMBERS]
        ptrdiff_t *bounds
        ptrdiff_t num_spans
    ctypedef struct Broadcast:
        Py_ssize_t each, count, step
    enum: MOST_ARRAYS
    enum: MOST_BROADCAST
    ctypedef struct Picking:
        char *rows
        char *picked
        const Py_ssize_t *numbers
        Py_ssize_t outer, height, count, width
        int itemsize, adds
    void pick(const Picking *picking)
    ctypedef struct Filtering:
        unsigned char *pixels
        const Py_ssize_t *first
        const Py_ssize_t *counts
        const float *weights
        unsigned char *out
        Py_ssize_t new, taps, width
    int can_filter()
    void filter_all "filter"(const Filtering *filtering)
    ctypedef struct Lookup:
        unsigned char *bytes
        float *table
        float *out
        Py_ssize_t size, channels
    enum: MOST_CHANNELS
    void look_up(const Lookup *lookup)
    enum: NUM_CONVERSIONS
    const char *CONVERSION_NAMES[]
    const int CONVERSION_BYTES[][2]
    enum: HAS_PHILOX
    void random_words(void *words, void *counter, void *key, Py_ssize_t num_blocks)
    void convert(int kind, void *to, void *source, Py_ssize_t size)
    Py_ssize_t length_of(const Entry *entry, const Py_ssize_t *sizes, const double *numbers)
    void run_loop(
        const Entry *entry, bint is_double, void **arrays, const Broadcast *broadcasts, Py_ssize_t length,
        Py_ssize_t size, const double *numbers, const Before *before, int num_before
    )

cdef enum:
    MOST_BEFORE = 8
    ALIGNED = 0x100
    IN_C_ORDER = 0x1 | ALIGNED
    WRITEABLE = 0x400

cdef object ndarray = np.ndarray
find_processor()
OF_FLOAT_ALONE = {ENTRIES[i].name.decode() for i in range(NUM_ENTRIES) if ENTRIES[i].of_double[0] is NULL}
PLACES = {ENTRIES[i].name.decode(): i for i in range(NUM_ENTRIES) if is_served(&ENTRIES[i])}

ARITIES = {ENTRIES[i].name.decode(): (ENTRIES[i].num_arrays, ENTRIES[i].num_numbers) for i in range(NUM_ENTRIES)}


ROWS = {ENTRIES[i].name.decode(): ENTRIES[i].rows.decode() for i in range(NUM_ENTRIES) if ENTRIES[i].rows is not NULL}
CONVERSIONS = {CONVERSION_NAMES[i].decode(): i for i in range(NUM_CONVERSIONS) if level >= 0}


def use_level(int number):
    """Run what was compiled for a set of instructions, from 0 on; return the number until now. For tests:
    the processor must have them."""
    global level
    cdef int before = level
    if not 0 <= number < NUM_LEVELS:
        raise ValueError(f"expected a level from 0 to {NUM_LEVELS - 1}, got {number}")
    level = number
    return before


def run(int place, bint is_double, tuple arrays, tuple numbers, tuple before=()):
    """Run a loop, by its place, over dense arrays of the sizes that it needs, all float64 or all float32; False if they
    are not such. One or two that an elementwise loop reads may be broadcast views of that size, in C order.

    ``before`` are loops over the first two arrays that run within the same pass, each before the next: their places,
    numbers, and the first and last + 1 element of the stretches that they are for, or None for all. The caller has
    looked at the types of the arrays. What is written may share no memory with others: the loops read ahead.
    """
    cdef void *starts[MOST_ARRAYS]
    cdef double values[MOST_NUMBERS]
    cdef Before befores[MOST_BEFORE]
    cdef Broadcast broadcasts[MOST_ARRAYS]
    cdef const Entry *entry = &ENTRIES[place]
    cdef Py_ssize_t sizes[MOST_ARRAYS]
    cdef Py_ssize_t length, size = 0
    cdef int i, num_broadcast, written = entry.written, count = len(before)
    if len(arrays) != entry.num_arrays:
        raise TypeError(f"{entry.name.decode()}: expected {entry.num_arrays} arrays, got {len(arrays)}")
    if count > MOST_BEFORE:
        return False
    for i in range(count):
        written |= ENTRIES[<int> before[i][0]].written
    num_broadcast = _look_at(arrays, written, 8 if is_double else 4, starts, sizes, broadcasts)
    if num_broadcast < 0 or num_broadcast and (count or entry.rows is not NULL or num_broadcast > MOST_BROADCAST):
        return False
    _take(entry, numbers, values)
    length = length_of(entry, sizes, values)
    if length < 0:
        return False
    for i in range(entry.num_arrays):
        size = max(size, sizes[i])
    kept = []  # the memory of the stretches
    for i in range(count):
        _take_before(&befores[i], before[i], is_double, kept)
    with nogil:
        run_loop(
            entry, is_double, starts, broadcasts if num_broadcast else NULL, length, size, values, befores, count
        )
    return True


cdef int _look_at(
    tuple arrays, int written, int itemsize, void **starts, Py_ssize_t *sizes, Broadcast *broadcasts
):
    """How many arrays are broadcast; -1 unless the others are dense, and those that a loop writes may be written and
    overlap no other."""
    cdef ArrayFields *a
    cdef Py_ssize_t n
    cdef Py_ssize_t extents[MOST_ARRAYS]
    cdef int i, k, wanted, found = 0, count = len(arrays)
    for i in range(count):
        if type(arrays[i]) is not ndarray:
            return -1
        a = <ArrayFields *> <void *> arrays[i]
        n = 1
        for k in range(a.nd):
            n *= a.dimensions[k]
        sizes[i], starts[i], extents[i] = n, a.data, n * itemsize
        broadcasts[i].each = 0
        wanted = IN_C_ORDER | WRITEABLE * (written >> i & 1)
        if a.flags & wanted != wanted:
            if written >> i & 1 or not a.flags & ALIGNED or not n or not _as_broadcast(a, &broadcasts[i]):
                return -1
            extents[i] = (broadcasts[i].count - 1) * broadcasts[i].step + itemsize
            found += 1
    for i in range(count):
        for k in range(i):
            if (
                <char *> starts[i] < <char *> starts[k] + extents[k]
                and <char *> starts[k] < <char *> starts[i] + extents[i]
                and (written >> i & 1 or written >> k & 1)
            ):
                return -1
    return found


cdef bint _as_broadcast(ArrayFields *a, Broadcast *b):
    """Whether an array is a row of values, each repeated, and all of that repeated."""
    cdef int k = a.nd - 1
    cdef Py_ssize_t stride = 0
    b.each, b.count, b.step = 1, 1, 0
    while k >= 0 and (a.strides[k] == 0 or a.dimensions[k] == 1):
        b.each *= a.dimensions[k]
        k -= 1
    while k >= 0 and (a.strides[k] != 0 or a.dimensions[k] == 1):
        if a.dimensions[k] > 1:
            if b.step == 0:
                b.step = stride = a.strides[k]
            if a.strides[k] != stride or stride < 0:
                return False
            stride *= a.dimensions[k]
            b.count *= a.dimensions[k]
        k -= 1
    while k >= 0 and (a.strides[k] == 0 or a.dimensions[k] == 1):
        k -= 1
    return k < 0


cdef int _take(const Entry *entry, tuple numbers, double *values) except -1:
    cdef int i
    if len(numbers) != entry.num_numbers:
        raise TypeError(f"{entry.name.decode()}: expected {entry.num_numbers} numbers, got {len(numbers)}")
    for i in range(entry.num_numbers):
        values[i] = numbers[i]
    return 0


cdef int _take_before(Before *loop, tuple given, bint is_double, list kept) except -1:
    """One loop that runs before the others."""
    cdef const Entry *entry = &ENTRIES[<int> given[0]]
    cdef Py_ssize_t k
    loop.loop = loop_of(entry, is_double)
    _take(entry, given[1], loop.numbers)
    loop.bounds, loop.num_spans = NULL, 0
    if given[2] is not None:
        spans = given[2]
        loop.num_spans = len(spans)
        memory = bytearray(2 * len(spans) * sizeof(ptrdiff_t) + 1)
        kept.append(memory)
        loop.bounds = <ptrdiff_t *> <char *> memory
        for k in range(loop.num_spans):
            loop.bounds[2 * k], loop.bounds[2 * k + 1] = spans[k][0], spans[k][1]
    return 0


def pick_rows(rows, numbers, picked, bint adds):
    """Copy the rows of (outer, height, width) of these numbers to (outer, count, width), or add those to them, in order;
    False if an array is not dense, or a number is none of a row.

    The caller has looked at types and shapes: both arrays have one, and the numbers are of the type of pointers.
    """
    cdef ArrayFields *a
    cdef Picking p
    cdef Py_ssize_t k
    arrays = (rows, numbers, picked)
    for i in range(3):
        if type(arrays[i]) is not ndarray:
            return False
        a = <ArrayFields *> <void *> arrays[i]
        if a.flags & IN_C_ORDER != IN_C_ORDER:
            return False
    if not (rows if adds else picked).flags.writeable:
        return False
    p.outer, p.height, p.width = rows.shape
    p.count, p.itemsize, p.adds = len(numbers), rows.itemsize, adds
    a = <ArrayFields *> <void *> rows
    p.rows = a.data
    a = <ArrayFields *> <void *> picked
    p.picked = a.data
    a = <ArrayFields *> <void *> numbers
    p.numbers = <const Py_ssize_t *> a.data
    for k in range(p.count):
        if not 0 <= p.numbers[k] < p.height:
            return False
    with nogil:
        pick(&p)
    return True


def filter_rows(pixels, first, counts, weights, out):
    """Make rows of bytes (new, width) of (old, width): each the sum of ``counts`` rows from ``first`` on, times its weights
    (new, taps), rounded; False if the processor lacks the instructions, if an array is not dense, or if two share memory.

    The caller has looked at types and at the length of ``first`` and ``counts``; no row may reach beyond the pixels or
    the weights.
    """
    cdef void *starts[MOST_ARRAYS]
    cdef Broadcast broadcasts[MOST_ARRAYS]
    cdef Py_ssize_t sizes[MOST_ARRAYS]
    cdef Filtering f
    cdef Py_ssize_t r, old
    if not can_filter():
        return False
    if _look_at((pixels, first, counts, weights, out), 1 << 4, 1, starts, sizes, broadcasts) != 0:
        return False
    old, f.width = pixels.shape
    f.new, f.taps = weights.shape
    f.pixels, f.first, f.counts = <unsigned char *> starts[0], <Py_ssize_t *> starts[1], <Py_ssize_t *> starts[2]
    f.weights, f.out = <float *> starts[3], <unsigned char *> starts[4]
    if sizes[1] != f.new or sizes[2] != f.new or sizes[4] != f.new * f.width:
        return False
    for r in range(f.new):
        if f.first[r] < 0 or not 0 <= f.counts[r] <= f.taps or f.first[r] + f.counts[r] > old:
            return False
    with nogil:
        filter_all(&f)
    return True


cdef bint _is_dense(object a, int itemsize, int wanted):
    """Whether an array is in C order, with elements of a size, and has these flags as well."""
    cdef ArrayFields *fields
    if type(a) is not ndarray or a.itemsize != itemsize:
        return False
    fields = <ArrayFields *> <void *> a
    return fields.flags & (IN_C_ORDER | wanted) == IN_C_ORDER | wanted


def by_table(bytes_, table, out):
    """Write to out, of floats, what a table (256, channels) says of each byte; the last axis of both has its channels.
    False if the processor lacks the instructions, if an array is not dense, or if sizes differ.

    The caller has looked at types, and out is memory of its own.
    """
    cdef Lookup l
    l.size, l.channels = bytes_.size, table.shape[1]
    if not can_filter() or not 1 <= l.channels <= MOST_CHANNELS or table.shape[0] != 256 or out.size != l.size:
        return False
    if bytes_.shape[bytes_.ndim - 1] != l.channels or not _is_dense(bytes_, 1, 0):
        return False
    if not _is_dense(table, 4, 0) or not _is_dense(out, 4, WRITEABLE):
        return False
    l.bytes = <unsigned char *> (<ArrayFields *> <void *> bytes_).data
    l.table = <float *> (<ArrayFields *> <void *> table).data
    l.out = <float *> (<ArrayFields *> <void *> out).data
    with nogil:
        look_up(&l)
    return True


def convert_elements(int kind, to, source):
    """Write what a conversion, by its number, makes of source; False unless both are dense and of one size.

    The caller has looked at the types, and to is memory of its own.
    """
    cdef ArrayFields *a
    cdef ArrayFields *b
    cdef Py_ssize_t size = source.size
    if not 0 <= kind < NUM_CONVERSIONS or to.size != size:
        return False
    if not _is_dense(to, CONVERSION_BYTES[kind][1], WRITEABLE) or not _is_dense(source, CONVERSION_BYTES[kind][0], 0):
        return False
    a, b = <ArrayFields *> <void *> to, <ArrayFields *> <void *> source
    with nogil:
        convert(kind, a.data, b.data, size)
    return True


def philox(words, counter, key):
    """Write the first words of NumPy's Philox with a counter (4,) and a key (2,), all of uint64, whole blocks of four;
    False if they are not such."""
    cdef ArrayFields *a
    cdef ArrayFields *b
    cdef ArrayFields *c
    cdef Py_ssize_t size = words.size
    if not HAS_PHILOX or size % 4 or counter.size != 4 or key.size != 2:
        return False
    if not _is_dense(words, 8, WRITEABLE) or not _is_dense(counter, 8, 0) or not _is_dense(key, 8, 0):
        return False
    a, b, c = <ArrayFields *> <void *> words, <ArrayFields *> <void *> counter, <ArrayFields *> <void *> key
    with nogil:
        random_words(a.data, b.data, c.data, size // 4)
    return True
