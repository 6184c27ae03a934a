/* The compiled forms of ckptstore's hot kernels: the extension module ckptstore.formats.core.
 *
 * numpy's kernels define what these do (formats/codecs/kernels.py and its neighbours). Each function takes contiguous
 * arrays (anything with the buffer protocol), checks sizes and overlaps before it writes, and refuses with ValueError.
 * Positions from a payload are checked while they are used. Loops over many bytes run without the interpreter lock.
 *
 * The loops are compiled once for each instruction set (loops.h). The best one that the processor has is used;
 * `select` chooses another one, for tests.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "copies.h"

#define ISA baseline
#define FULL_PRODUCTS 0
#define MASKS 0 /* whether a comparison of vectors gives a bit for each value */
#include "loops.h"
#undef ISA

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2")
#endif
#define ISA avx2
#include "loops.h"
#undef ISA
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,bmi,bmi2,prefer-vector-width=512")
#endif
#define ISA avx512
#undef FULL_PRODUCTS
#define FULL_PRODUCTS 1
#undef MASKS
#define MASKS 1
#include "loops.h"
#undef ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#include "groups.h"
#include "ungroups.h"

static const struct loops *usable[3]; /* the best last */
static size_t usable_count;
static const struct loops *volatile chosen;

/* __builtin_cpu_supports is not in every compiler's runtime. */
static void look_at_the_processor(void)
{
    usable[usable_count++] = &loops_baseline;
#if defined(__x86_64__)
    unsigned a, b = 0, c = 0, d, seven = 0, saved = 0, high;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) {
        __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); /* the registers that the system saves */
        __get_cpuid_count(7, 0, &a, &seven, &d, &d);
    }
    unsigned avx2 = bit_AVX2 | bit_BMI | bit_BMI2, avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if ((saved & 0x06) == 0x06 && (c & bit_FMA) && (seven & avx2) == avx2) {
        usable[usable_count++] = &loops_avx2;
        if ((saved & 0xE6) == 0xE6 && (seven & avx512) == avx512)
            usable[usable_count++] = &loops_avx512;
    }
#endif
    chosen = usable[usable_count - 1];
}

/* --------------------------------------------------------------------------------------------------- arguments */

enum { MOST = 12, UNLOCKED = 1 << 15 };

struct array {
    void *at;
    size_t bytes;
    size_t item;
    size_t count;
};

/* The arguments of a call, by kind and in order. */
struct call {
    Py_buffer views[MOST];
    struct array arrays[MOST];
    size_t array_count;
    size_t list_begin, list_end;
    long long ints[4];
    double reals[8];
};

static PyObject *ended(struct call *call, PyObject *result)
{
    for (size_t i = 0; i < call->array_count; i++)
        PyBuffer_Release(&call->views[i]);
    return result;
}

static PyObject *refused(struct call *call, const char *why)
{
    PyErr_SetString(PyExc_ValueError, why);
    return ended(call, NULL);
}

static int add_array(struct call *call, PyObject *object, int writable)
{
    if (call->array_count == MOST) {
        PyErr_SetString(PyExc_ValueError, "too many arrays");
        return 0;
    }
    Py_buffer *view = &call->views[call->array_count];
    if (PyObject_GetBuffer(object, view, PyBUF_ND | (writable ? PyBUF_WRITABLE : 0))) {
        if (PyErr_ExceptionMatches(PyExc_BufferError)) {
            PyErr_Clear();
            PyErr_SetString(PyExc_ValueError, writable ? "an array must be contiguous and writable" : "an array must be contiguous");
        }
        return 0;
    }
    struct array *array = &call->arrays[call->array_count++];
    array->at = view->buf;
    array->bytes = (size_t)view->len;
    array->item = (size_t)view->itemsize;
    if (array->item != 1 && array->item != 2 && array->item != 4 && array->item != 8) {
        PyErr_SetString(PyExc_ValueError, "items must have 1, 2, 4 or 8 bytes");
        return 0;
    }
    array->count = array->bytes / array->item;
    return 1;
}

/* `kinds` has a letter for each argument: r, an array; w, one that is written; l, L, lists of them; i, an integer;
 * f, a float. Returns 0, with an error set and nothing to release. */
static int parse(struct call *call, const char *kinds, PyObject *const *args, Py_ssize_t number)
{
    size_t ints = 0, reals = 0;
    call->array_count = call->list_begin = call->list_end = 0;
    if (number != (Py_ssize_t)strlen(kinds)) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zu", number, strlen(kinds));
        return 0;
    }
    for (Py_ssize_t i = 0; i < number; i++) {
        PyObject *given = args[i];
        switch (kinds[i]) {
        case 'r':
        case 'w':
            if (!add_array(call, given, kinds[i] == 'w'))
                goto failed;
            break;
        case 'l':
        case 'L':
            if (!PyList_Check(given)) {
                PyErr_SetString(PyExc_TypeError, "expected a list of arrays");
                goto failed;
            }
            call->list_begin = call->array_count;
            for (Py_ssize_t k = 0; k < PyList_Size(given); k++) {
                PyObject *one = PyList_GetItem(given, k);
                if (one == NULL || !add_array(call, one, kinds[i] == 'L'))
                    goto failed;
            }
            call->list_end = call->array_count;
            break;
        case 'i':
            call->ints[ints] = PyLong_AsLongLong(given);
            if (call->ints[ints++] == -1 && PyErr_Occurred())
                goto failed;
            break;
        case 'f':
            call->reals[reals] = PyFloat_AsDouble(given);
            if (call->reals[reals++] == -1.0 && PyErr_Occurred())
                goto failed;
            break;
        }
    }
    return 1;
failed:
    ended(call, NULL);
    return 0;
}

static int apart(const struct array *one, const struct array *other)
{
    uintptr_t a = (uintptr_t)one->at, b = (uintptr_t)other->at;
    return !one->bytes || !other->bytes || a + one->bytes <= b || b + other->bytes <= a;
}

/* Whether an array is written in place, or does not overlap. */
static int in_place(const struct array *one, const struct array *other)
{
    return apart(one, other) || (one->at == other->at && one->bytes == other->bytes);
}

static int all_apart(const struct call *call)
{
    for (size_t i = 0; i < call->array_count; i++)
        for (size_t k = 0; k < i; k++)
            if (!apart(&call->arrays[i], &call->arrays[k]))
                return 0;
    return 1;
}

static int alike(const struct array *one, const struct array *other)
{
    return one->item == other->item && one->count == other->count;
}

/* Whether all arrays from `first` on have fp32 numbers, and the same length. */
static int floats(const struct call *call, size_t first)
{
    for (size_t i = first; i < call->array_count; i++)
        if (call->arrays[i].item != 4 || call->arrays[i].count != call->arrays[first].count)
            return 0;
    return 1;
}

static int width(const struct array *array)
{
    return array->item == 1 ? 0 : array->item == 2 ? 1 : array->item == 4 ? 2 : 3;
}

/* Takes the last of `all` arguments, a function, away. */
static PyObject *function(PyObject *const *args, Py_ssize_t *number, Py_ssize_t all)
{
    if (*number != all)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", *number, all);
    if (!PyCallable_Check(args[all - 1]))
        return PyErr_Format(PyExc_TypeError, "the last argument must be a function");
    --*number;
    return args[all - 1];
}

#define BEGIN(kinds)                                                                                                   \
    struct call call;                                                                                                  \
    (void)self;                                                                                                        \
    if (!parse(&call, kinds, args, number))                                                                            \
        return NULL;                                                                                                   \
    struct array *a = call.arrays;                                                                                     \
    const struct loops *loops = chosen;                                                                                \
    (void)a;                                                                                                           \
    (void)loops;
#define NEED(condition, why)                                                                                           \
    if (!(condition))                                                                                                  \
        return refused(&call, why);
/* A short loop ends before another thread could have taken the lock and released it. */
#define RUN(bytes, ...)                                                                                                \
    do {                                                                                                               \
        if ((bytes) >= UNLOCKED) {                                                                                     \
            Py_BEGIN_ALLOW_THREADS __VA_ARGS__;                                                                        \
            Py_END_ALLOW_THREADS                                                                                       \
        } else {                                                                                                       \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)
#define NONE return ended(&call, Py_NewRef(Py_None))
#define FUNCTION(name) static PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t number)

static const char SIZES[] = "arrays differ in their items or lengths", OVERLAP[] = "arrays overlap",
                  LIMIT[] = "a limit is out of range", LITTLE[] = "too little space",
                  UNKNOWN[] = "an unknown level or variant";

/* ----------------------------------------------------------------------------------------------- words and planes */

FUNCTION(difference)
{
    BEGIN("rrw")
    NEED(alike(&a[0], &a[2]) && alike(&a[1], &a[2]), SIZES)
    NEED(in_place(&a[0], &a[2]) && in_place(&a[1], &a[2]), OVERLAP)
    RUN(a[2].bytes, loops->difference[width(&a[2])](a[0].at, a[1].at, a[2].at, a[2].count));
    NONE;
}

FUNCTION(zigzag)
{
    BEGIN("rw")
    NEED(alike(&a[0], &a[1]), SIZES)
    NEED(in_place(&a[0], &a[1]), OVERLAP)
    RUN(a[1].bytes, loops->zigzag[width(&a[1])](a[0].at, a[1].at, a[1].count));
    NONE;
}

FUNCTION(rotate_left)
{
    BEGIN("rw")
    NEED(alike(&a[0], &a[1]), SIZES)
    NEED(in_place(&a[0], &a[1]), OVERLAP)
    RUN(a[1].bytes, loops->rotate_left[width(&a[1])](a[0].at, a[1].at, a[1].count));
    NONE;
}

/* Whether the planes of a list fit `words`, or its low bytes. Returns the reason if not, else NULL. */
static const char *planes_of(const struct call *call, const struct array *words, int all, struct plane *planes)
{
    size_t bytes = 0;
    for (size_t i = call->list_begin; i < call->list_end; i++) {
        const struct array *plane = &call->arrays[i];
        if (plane->count != words->count)
            return SIZES;
        if (!apart(plane, words))
            return OVERLAP;
        planes[i - call->list_begin] = (struct plane){plane->at, plane->item};
        bytes += plane->item;
    }
    return bytes > words->item || !bytes || (all && bytes < words->item) ? "the planes have another size than the words" : NULL;
}

FUNCTION(split)
{
    BEGIN("rL")
    struct plane planes[MOST];
    const char *wrong = planes_of(&call, &a[0], 1, planes);
    NEED(wrong == NULL, wrong)
    for (size_t i = call.list_begin; i < call.list_end; i++)
        for (size_t k = i + 1; k < call.list_end; k++)
            NEED(apart(&a[i], &a[k]), OVERLAP)
    RUN(a[0].bytes, loops->split[width(&a[0])](a[0].at, planes, call.list_end - call.list_begin, a[0].count));
    NONE;
}

FUNCTION(combine)
{
    BEGIN("lirw")
    struct plane planes[MOST];
    struct array *base = &a[call.array_count - 2], *out = &a[call.array_count - 1];
    int how = (int)call.ints[0];
    const char *wrong = planes_of(&call, out, 0, planes);
    NEED(wrong == NULL, wrong)
    NEED(call.ints[0] >= PUT && call.ints[0] <= XOR, "an unknown operation")
    if (how == ADD || how == XOR) {
        NEED(alike(base, out), SIZES)
        NEED(in_place(base, out), OVERLAP)
    } else
        base = NULL;
    RUN(out->bytes, loops->combine[width(out)](planes, call.list_end - call.list_begin, how, base ? base->at : NULL,
                                               out->at, out->count));
    NONE;
}

/* ------------------------------------------------------------------------------------------------------- values */

FUNCTION(pack_small)
{
    BEGIN("riw")
    size_t bits = (size_t)call.ints[0];
    NEED(bits == 2 || bits == 4, "bits must be 2 or 4")
    NEED(a[0].item == 1 && a[1].item == 1 && a[1].count == (a[0].count * bits + 7) / 8, SIZES)
    NEED(apart(&a[0], &a[1]), OVERLAP)
    RUN(a[0].bytes, loops->pack_small(a[0].at, (int)bits, a[1].at, a[0].count));
    NONE;
}

FUNCTION(unpack_small)
{
    BEGIN("riw")
    size_t bits = (size_t)call.ints[0];
    NEED(bits == 2 || bits == 4, "bits must be 2 or 4")
    NEED(a[0].item == 1 && a[1].item == 1 && a[0].count >= (a[1].count * bits + 7) / 8, SIZES)
    NEED(apart(&a[0], &a[1]), OVERLAP)
    RUN(a[1].bytes, loops->unpack_small(a[0].at, (int)bits, a[1].at, a[1].count));
    NONE;
}

/* Whether `limit` is a value of the words. */
static int fits(long long limit, const struct array *words)
{
    return limit >= 0 && (words->item == 8 || (unsigned long long)limit >> (8 * words->item) == 0);
}

FUNCTION(find_exceptions)
{
    BEGIN("riw")
    size_t found = 0;
    NEED(a[1].item == 4 && a[1].count >= a[0].count && a[0].count <= UINT32_MAX, SIZES)
    NEED(fits(call.ints[0], &a[0]), LIMIT)
    NEED(apart(&a[0], &a[1]), OVERLAP)
    RUN(a[0].bytes, found = loops->find[width(&a[0])](a[0].at, (uint64_t)call.ints[0], a[1].at, a[0].count));
    return ended(&call, PyLong_FromSize_t(found));
}

/* take_exceptions(values, limit, where, rest, steps, greater) */
FUNCTION(take_exceptions)
{
    BEGIN("rirwww")
    int64_t steps = 0;
    NEED(a[1].item == 4 && a[2].item == 1 && a[3].item == 1 && a[4].item == a[0].item && a[4].count == a[1].count &&
             (a[2].count == 0 || a[2].count == a[0].count),
         SIZES)
    NEED(fits(call.ints[0], &a[0]), LIMIT)
    for (size_t i = 2; i < 5; i++)
        for (size_t k = 0; k < i; k++)
            NEED(apart(&a[i], &a[k]), OVERLAP)
    RUN(a[0].bytes, steps = loops->take[width(&a[0])](a[0].at, (uint64_t)call.ints[0], a[1].at, a[1].count,
                                                      a[2].count ? a[2].at : NULL, a[3].at, a[3].count, a[4].at,
                                                      a[0].count));
    NEED(steps >= 0, "positions that are not of these values")
    return ended(&call, PyLong_FromLongLong(steps));
}

FUNCTION(put_exceptions)
{
    BEGIN("rriw")
    int fitted = 0;
    NEED(a[0].item == 1 && a[1].item == a[2].item, SIZES)
    NEED(fits(call.ints[0], &a[2]), LIMIT)
    NEED(apart(&a[0], &a[2]) && apart(&a[1], &a[2]), OVERLAP)
    RUN(a[0].bytes, fitted = loops->put[width(&a[2])](a[0].at, a[0].count, a[1].at, a[1].count,
                                                      (uint64_t)call.ints[0], a[2].at, a[2].count));
    return ended(&call, PyBool_FromLong(fitted));
}

/* The sum of n log n over a histogram, by the caller's table; and the greatest count. */
static long long information(const uint32_t *counts, size_t number, const i64 *n_log_n, uint32_t *most)
{
    unsigned long long found = 0; /* unsigned: with an arbitrary table a signed sum could overflow */
    for (size_t i = 0; i < number; i++) {
        found += (unsigned long long)n_log_n[counts[i]];
        *most = counts[i] > *most ? counts[i] : *most;
    }
    return (long long)found;
}

/* survey(values, n_log_n) */
FUNCTION(survey)
{
    BEGIN("rr")
    uint32_t counts[256], most = 0;
    NEED(a[0].item == 1 && a[1].item == 8 && a[1].count > a[0].count, SIZES)
    loops->histogram(a[0].at, a[0].count, counts);
    long long sum = information(counts, 256, a[1].at, &most);
    return ended(&call, Py_BuildValue("kkL", (unsigned long)counts[0], (unsigned long)most, sum));
}

/* survey_packed(values, bits, n_log_n) */
FUNCTION(survey_packed)
{
    BEGIN("rir")
    uint32_t counts[256], packed[256] = {0}, most = 0, unused = 0;
    const u8 *values = a[0].at;
    size_t bits = (size_t)call.ints[0], exceptions = 0;
    NEED(bits == 1 || bits == 2 || bits == 4, "bits must be 1, 2 or 4")
    NEED(a[0].item == 1 && a[1].item == 8 && a[1].count > a[0].count, SIZES)
    size_t limit = (size_t)1 << bits, per = 8 / bits;
    loops->histogram(values, a[0].count, counts);
    for (size_t i = limit; i < 256; i++)
        exceptions += counts[i];
    long long greater = information(counts + limit, 256 - limit, a[1].at, &unused);
    for (size_t i = 0; i < a[0].count; i += per) {
        u8 byte = 0;
        for (size_t lane = 0; lane < per && i + lane < a[0].count; lane++)
            if (values[i + lane] < limit)
                byte = (u8)(byte | values[i + lane] << bits * lane);
        packed[byte]++;
    }
    long long sum = information(packed, 256, a[1].at, &most);
    return ended(&call, Py_BuildValue("kLkL", (unsigned long)exceptions, greater, (unsigned long)most, sum));
}

/* literals(values, out) */
FUNCTION(literals)
{
    BEGIN("rw")
    size_t size = 0;
    NEED(a[0].item == 1 && a[1].item == 1, SIZES)
    NEED(a[0].count <= MOST_LITERALS, "too many values for one frame")
    NEED(apart(&a[0], &a[1]), OVERLAP)
    RUN(a[0].bytes, size = loops->literals(a[0].at, a[0].count, a[1].at, a[1].count));
    return ended(&call, PyLong_FromSize_t(size));
}

/* read_literals(frame, out): whether the frame has only literals, exactly those */
FUNCTION(read_literals)
{
    BEGIN("rw")
    int found = 0;
    NEED(a[0].item == 1 && a[1].item == 1, SIZES)
    NEED(apart(&a[0], &a[1]), OVERLAP)
    RUN(a[1].bytes, found = loops->read_literals(a[0].at, a[0].count, a[1].at, a[1].count));
    return ended(&call, PyBool_FromLong(found));
}

/* Writing calls zstd's compressor in Python for some pieces: it takes the lock only for that. */
static PyObject *written(struct call *call, struct coder *c)
{
    if (c->state)
        PyEval_RestoreThread(c->state);
    if (PyErr_Occurred())
        return ended(call, NULL);
    if (c->failed)
        return refused(call, LITTLE); /* cannot be: all of them checked it */
    return ended(call, PyLong_FromSize_t(c->at));
}

/* write_group(words, level, nested, n_log_n, space, out, compress) */
FUNCTION(write_group)
{
    PyObject *compress = function(args, &number, 7);
    if (compress == NULL)
        return NULL;
    BEGIN("riirww")
    NEED(a[0].count > 0 && a[0].count <= UINT32_MAX && a[1].item == 8 && a[1].count > SAMPLE, SIZES)
    NEED(a[2].item == 1 && a[2].count >= 8 * a[0].bytes + SPACE, LITTLE)
    NEED(a[3].item == 1 && a[3].count >= a[0].bytes + MARGIN, LITTLE)
    NEED((call.ints[0] | 1) == 1, UNKNOWN)
    NEED(all_apart(&call), OVERLAP)
    struct coder c = {.loops = loops, .n_log_n = a[1].at, .level = (int)call.ints[0], .out = a[3].at, .most = a[3].count,
                      .space = a[2].at, .size = a[2].count, .compress = compress};
    c.state = a[0].bytes >= UNLOCKED ? PyEval_SaveThread() : NULL;
    put_group(&c, a[0].at, a[0].item, a[0].count, call.ints[1] != 0);
    return written(&call, &c);
}

/* write_chunks(new, base, kinds, lengths, level, n_log_n, space, out, ends, compress): the bytes of all payloads */
FUNCTION(write_chunks)
{
    PyObject *compress = function(args, &number, 10);
    if (compress == NULL)
        return NULL;
    BEGIN("rrrrirwww")
    const u8 *kinds = a[2].at;
    const i64 *lengths = a[3].at;
    size_t count = a[3].count, total = 0, of_base = 0, longest = 0;
    NEED(a[0].item == 1 && a[1].item == 1 && a[2].item == 1 && a[3].item == 8 && a[2].count == count, SIZES)
    NEED(a[4].item == 8 && a[4].count > SAMPLE && a[5].item == 1 && a[6].item == 1 && a[7].item == 8 && a[7].count == count, SIZES)
    NEED((call.ints[0] | 1) == 1, UNKNOWN)
    NEED(all_apart(&call), OVERLAP)
    for (size_t i = 0; i < count; i++) {
        NEED(kinds[i] >> 2 < MAPS, UNKNOWN)
        NEED(lengths[i] >= 0 && (uint64_t)lengths[i] <= a[0].count - total, SIZES)
        size_t length = (size_t)lengths[i];
        total += length;
        of_base += has_base(kinds[i]) ? length : 0;
        longest = length > longest ? length : longest;
    }
    NEED(total == a[0].count && of_base == a[1].count && longest <= UINT32_MAX, SIZES)
    NEED(a[5].count >= 9 * longest + 2 * SPACE, LITTLE)
    NEED(a[6].count >= total + count * OVERHEAD + MARGIN, LITTLE)
    struct coder c = {.loops = loops, .n_log_n = a[4].at, .level = (int)call.ints[0], .out = a[6].at, .most = a[6].count,
                      .space = a[5].at, .size = a[5].count, .compress = compress};
    const u8 *new = a[0].at, *base = a[1].at;
    i64 *ends = a[7].at;
    int changed = 0;
    c.state = total >= UNLOCKED ? PyEval_SaveThread() : NULL;
    for (size_t i = 0; i < count && !c.failed && !changed; i++) {
        /* read only once: another thread may write them in between */
        int kind = ((const volatile u8 *)kinds)[i];
        uint64_t length = (uint64_t)((const volatile i64 *)lengths)[i];
        size_t needed = has_base(kind) ? (size_t)length : 0;
        changed = kind >> 2 >= MAPS || length > longest || length > total || needed > of_base;
        if (changed)
            break;
        put_chunk(&c, kind, new, base, (size_t)length);
        ends[i] = (int64_t)c.at;
        new += length;
        total -= length;
        base += needed;
        of_base -= needed;
    }
    if (changed) {
        if (c.state)
            PyEval_RestoreThread(c.state);
        return refused(&call, "kinds or lengths were changed meanwhile");
    }
    return written(&call, &c);
}

static const char PAST[] = "a position after the payload";

/* read_group(payload, at, how, base, out, space, decompress): the position behind the group; -1: the reference has to read it */
FUNCTION(read_group)
{
    PyObject *decompress = function(args, &number, 7);
    if (decompress == NULL)
        return NULL;
    BEGIN("riirww")
    struct array *base = &a[1], *out = &a[2];
    int how = (int)call.ints[1];
    NEED(a[0].item == 1 && out->count > 0 && out->count < UINT32_MAX, SIZES)
    NEED(a[3].item == 1 && a[3].count >= 6 * out->bytes + SPACE, LITTLE)
    NEED(call.ints[0] >= 0 && (unsigned long long)call.ints[0] <= a[0].count, PAST)
    NEED(call.ints[1] >= PUT && call.ints[1] <= XOR, "an unknown operation")
    NEED(apart(&a[0], out) && apart(&a[0], &a[3]) && apart(out, &a[3]) && apart(base, &a[3]), OVERLAP)
    if (how == ADD || how == XOR) {
        NEED(alike(base, out), SIZES)
        NEED(in_place(base, out), OVERLAP)
    }
    struct reader r = {.loops = loops, .data = a[0].at, .at = (size_t)call.ints[0], .end = a[0].count, .space = a[3].at,
                       .size = a[3].count, .decompress = decompress};
    r.state = out->bytes >= UNLOCKED ? PyEval_SaveThread() : NULL;
    struct group group = {0};
    size_t word = out->item, next = 0;
    get_group(&r, word, out->count, &group, 0);
    for (size_t start = 0; start < out->count && !r.failed; start += TILE_WORDS) {
        size_t size = out->count - start < TILE_WORDS ? out->count - start : TILE_WORDS;
        const u8 *from = how == ADD || how == XOR ? (const u8 *)base->at + start * word : NULL;
        apply(loops, &group, word, how, from, (u8 *)out->at + start * word, start, size, &next);
    }
    if (r.state)
        PyEval_RestoreThread(r.state);
    return ended(&call, PyLong_FromLongLong(r.failed ? -1 : (long long)r.at));
}

/* ----------------------------------------------------------------------------------------------------- contexts */

/* classify(base, shift, low, high, labels, counts): counts has four rows */
FUNCTION(classify)
{
    BEGIN("riiiww")
    long long shift = call.ints[0], low = call.ints[1], high = call.ints[2];
    NEED(a[1].item == 1 && a[1].count == a[0].count && a[2].item == 8, SIZES)
    NEED(shift >= 0 && shift < 8 * (long long)a[0].item && low >= 0 && high >= low && high - low < 256 &&
             fits(high, &a[0]),
         LIMIT)
    NEED(a[2].count == 4 * (size_t)(high - low + 1) && a[0].count <= UINT32_MAX, SIZES)
    NEED(apart(&a[0], &a[1]) && apart(&a[0], &a[2]) && apart(&a[1], &a[2]), OVERLAP)
    RUN(a[0].bytes, {
        size_t classes = a[2].count / 4, quarter = a[0].count / 4;
        u8 *labels = a[1].at;
        i64 *counts = a[2].at;
        loops->classify[width(&a[0])](a[0].at, (int)shift, (uint64_t)low, (uint64_t)high, labels, a[0].count);
        for (size_t row = 0; row < 4; row++) {
            uint32_t found[256];
            loops->histogram(labels + row * quarter, row < 3 ? quarter : a[0].count - 3 * quarter, found);
            for (size_t k = 0; k < classes; k++)
                counts[row * classes + k] = found[k];
        }
    });
    NONE;
}

/* The start of each quarter's part of each class in the sorted words. They are in the order of classes, then of
 * quarters. Other classes begin at the end, where nothing is written. Returns 0 if the counts do not add up to `count`.
 */
static int first_places(const struct array *counts, size_t count, uint64_t (*places)[256])
{
    size_t classes = counts->count / 4;
    const i64 *of = counts->at;
    uint64_t at = 0;
    for (size_t row = 0; row < 4; row++)
        for (size_t k = 0; k < 256; k++)
            places[row][k] = count;
    for (size_t k = 0; k < classes; k++)
        for (size_t row = 0; row < 4; row++) {
            int64_t size = of[row * classes + k];
            if (size < 0 || (uint64_t)size > count - at)
                return 0;
            places[row][k] = at;
            at += (uint64_t)size;
        }
    return at == count;
}

static int counted(const struct array *labels, const struct array *counts, const struct array *words)
{
    return labels->item == 1 && labels->count == words->count && counts->item == 8 && counts->count % 4 == 0 &&
           counts->count <= 4 * 256;
}

static const char COUNTS[] = "the counts are not those of the labels";

/* sort(words, labels, counts, out) */
FUNCTION(sort)
{
    BEGIN("rrrw")
    uint64_t places[4][256];
    int sorted = 0;
    NEED(alike(&a[0], &a[3]) && counted(&a[1], &a[2], &a[0]), SIZES)
    NEED(apart(&a[0], &a[3]) && apart(&a[1], &a[3]) && apart(&a[2], &a[3]), OVERLAP)
    NEED(first_places(&a[2], a[0].count, places), COUNTS)
    RUN(a[0].bytes, sorted = loops->sort[width(&a[0])](a[0].at, a[1].at, places, a[3].at, a[0].count));
    NEED(sorted, COUNTS)
    NONE;
}

/* add_unsorted(words, labels, counts, base, out) */
FUNCTION(add_unsorted)
{
    BEGIN("rrrrw")
    uint64_t places[4][256];
    int sorted = 0;
    NEED(alike(&a[0], &a[4]) && alike(&a[3], &a[4]) && counted(&a[1], &a[2], &a[0]), SIZES)
    NEED(apart(&a[0], &a[4]) && apart(&a[1], &a[4]) && apart(&a[2], &a[4]) && in_place(&a[3], &a[4]), OVERLAP)
    NEED(first_places(&a[2], a[0].count, places), COUNTS)
    RUN(a[0].bytes,
        sorted = loops->add_unsorted[width(&a[0])](a[0].at, a[1].at, places, a[3].at, a[4].at, a[0].count));
    NEED(sorted, COUNTS)
    NONE;
}

FUNCTION(to_bfloat16)
{
    BEGIN("rw")
    NEED(a[0].item == 4 && a[1].item == 2 && a[0].count == a[1].count, SIZES)
    NEED(apart(&a[0], &a[1]), OVERLAP)
    RUN(a[0].bytes, loops->to_bfloat16(a[0].at, a[1].at, a[1].count));
    NONE;
}

FUNCTION(to_float16)
{
    BEGIN("rw")
    NEED(a[0].item == 4 && a[1].item == 2 && a[0].count == a[1].count, SIZES)
    NEED(apart(&a[0], &a[1]), OVERLAP)
    RUN(a[0].bytes, loops->to_float16(a[0].at, a[1].at, a[1].count));
    NONE;
}

/* --------------------------------------------------------------------------------------- optimizer arithmetic */

/* fma(a, b, c, out): b is an array or a number */
FUNCTION(fma)
{
    int scalar = number == 4 && PyFloat_Check(args[1]);
    BEGIN(scalar ? "rfrw" : "rrrw")
    struct array *out = &a[call.array_count - 1];
    NEED(floats(&call, 0), SIZES)
    for (size_t i = 0; i + 1 < call.array_count; i++)
        NEED(in_place(&a[i], out), OVERLAP)
    if (scalar)
        RUN(out->bytes, loops->fma_scalar(a[0].at, (float)call.reals[0], a[1].at, out->at, out->count));
    else
        RUN(out->bytes, loops->fma_array(a[0].at, a[1].at, a[2].at, out->at, out->count));
    NONE;
}

/* moments(variant, near, first, second, gradient, share, keep, weight2) */
FUNCTION(moments)
{
    BEGIN("iiwwrfff")
    NEED(floats(&call, 0), SIZES)
    NEED(all_apart(&call), OVERLAP)
    NEED(call.ints[0] >= FMA && call.ints[0] <= DIVIDE && (call.ints[1] | 1) == 1, "an unknown variant")
    RUN(a[0].bytes, loops->moments((int)call.ints[0], (int)call.ints[1], a[0].at, a[1].at, a[2].at,
                                   (float)call.reals[0], (float)call.reals[1], (float)call.reals[2], a[0].count));
    NONE;
}

/* second_moment(first, before, second, inverse, keep, weight2, out) */
FUNCTION(second_moment)
{
    BEGIN("rrrfffw")
    NEED(floats(&call, 0), SIZES)
    for (size_t i = 0; i < 3; i++)
        NEED(in_place(&a[i], &a[3]), OVERLAP)
    RUN(a[3].bytes, loops->second_moment(a[0].at, a[1].at, a[2].at, call.reals[0], (float)call.reals[1],
                                         call.reals[2], a[3].at, a[3].count));
    NONE;
}

/* move(divide, weight, first, second, shrink, root, eps, rate) */
FUNCTION(move)
{
    BEGIN("iwrrffff")
    NEED(floats(&call, 0), SIZES)
    NEED(in_place(&a[1], &a[0]) && in_place(&a[2], &a[0]), OVERLAP)
    RUN(a[0].bytes,
        loops->move(call.ints[0] != 0, a[0].at, a[1].at, a[2].at, (float)call.reals[0], (float)call.reals[1],
                    (float)call.reals[2], (float)call.reals[3], a[0].count));
    NONE;
}

enum { FEW = 64, HEAD = 2048 };

/* Whether few numbers of the head were missed. Otherwise those of all are not counted. */
static int few(const size_t *missed)
{
    return FEW * missed[0] < HEAD;
}

/* residuals.write_residual of zigzag differences; `missed` counts those that are not zero in the head and behind it. */
static void put_residual(struct coder *c, const u32 *differences, const size_t *missed, size_t count, int level)
{
    size_t all = missed[0] + missed[1];
    if (c->failed)
        return;
    if (few(missed) && !all) {
        put_byte(c, ZERO_GROUP);
        return;
    }
    c->level = few(missed) && FEW * all < count ? 1 : level;
    put_group(c, (const u8 *)differences, 4, count, 0);
}

/* write_adam(old and new: weight, first, second; divide, inverse, beta2, weight2, shrink, root, eps, rate, level,
 *            n_log_n, space, out, compress): one block of the encoding `predicted` (residuals.write_residual) */
FUNCTION(write_adam)
{
    PyObject *compress = function(args, &number, 19);
    if (compress == NULL)
        return NULL;
    BEGIN("rrrrrrifffffffirww")
    size_t count = a[0].count, missed[3][2] = {{0}};
    for (size_t i = 0; i < 6; i++)
        NEED(a[i].item == 4 && a[i].count == count, SIZES)
    NEED(count > 0 && count <= UINT32_MAX && a[6].item == 8 && a[6].count > SAMPLE, SIZES)
    NEED(a[7].item == 1 && a[7].count >= 11 * 4 * count + 2 * SPACE, LITTLE)
    NEED(a[8].item == 1 && a[8].count >= 3 * (4 * count + 2 * MARGIN), LITTLE)
    NEED((call.ints[0] | 1) == 1 && (call.ints[1] | 1) == 1, UNKNOWN)
    for (size_t i = 7; i < 9; i++)
        for (size_t k = 0; k < i; k++)
            NEED(apart(&a[i], &a[k]), OVERLAP)
    struct adam rule = {(int)call.ints[0],         call.reals[0],        call.reals[2],        (float)call.reals[1],
                        (float)call.reals[3], (float)call.reals[4], (float)call.reals[5], (float)call.reals[6]};
    struct coder c = {.loops = loops, .n_log_n = a[6].at, .out = a[8].at, .most = a[8].count, .space = a[7].at,
                      .size = a[7].count, .compress = compress};
    u32 *differences[3];
    for (size_t i = 0; i < 3; i++)
        differences[i] = (u32 *)room(&c, 4 * count);
    c.state = count >= UNLOCKED / 4 ? PyEval_SaveThread() : NULL;
    const f32 *old[3] = {a[0].at, a[1].at, a[2].at}, *new[3] = {a[3].at, a[4].at, a[5].at};
    loops->adam_differences(&rule, old, new, differences, missed, HEAD, count);
    if (few(missed[1])) /* seldom: so only those of the head were counted */
        missed[1][1] = loops->missed(a[4].at, a[1].at, count) - missed[1][0];
    static const int order[3] = {1, 2, 0};
    for (size_t i = 0; i < 3; i++)
        put_residual(&c, differences[order[i]], missed[order[i]], count, (int)call.ints[1]);
    return written(&call, &c);
}

/* read_adam(payload, at, weight, first, second, divide, inverse, beta2, weight2, shrink, root, eps, rate, space,
 *           decompress): takes a step of the encoding `predicted` in place; the position behind the block, or -1 */
FUNCTION(read_adam)
{
    PyObject *decompress = function(args, &number, 15);
    if (decompress == NULL)
        return NULL;
    BEGIN("riwwwifffffffw")
    size_t count = a[1].count;
    NEED(a[0].item == 1 && count > 0 && count < UINT32_MAX, SIZES)
    NEED(a[4].item == 1 && a[4].count >= 8 * 4 * count + 2 * SPACE, LITTLE)
    for (size_t i = 1; i < 4; i++)
        NEED(a[i].item == 4 && a[i].count == count, SIZES)
    NEED(call.ints[0] >= 0 && (unsigned long long)call.ints[0] <= a[0].count, PAST)
    NEED((call.ints[1] | 1) == 1, UNKNOWN)
    NEED(all_apart(&call), OVERLAP)
    struct adam rule = {(int)call.ints[1],         call.reals[0],        call.reals[2],        (float)call.reals[1],
                        (float)call.reals[3], (float)call.reals[4], (float)call.reals[5], (float)call.reals[6]};
    struct reader r = {.loops = loops, .data = a[0].at, .at = (size_t)call.ints[0], .end = a[0].count, .space = a[4].at,
                       .size = a[4].count, .decompress = decompress};
    struct group groups[3] = {{0}};
    size_t next[3] = {0};
    r.state = count >= UNLOCKED / 4 ? PyEval_SaveThread() : NULL;
    for (size_t i = 0; i < 3; i++)
        get_group(&r, 4, count, &groups[i], 0);
    for (size_t start = 0; start < count && !r.failed; start += TILE_WORDS) {
        size_t size = count - start < TILE_WORDS ? count - start : TILE_WORDS;
        f32 *w = (f32 *)a[1].at + start, *m = (f32 *)a[2].at + start, *v = (f32 *)a[3].at + start;
        float first[TILE_WORDS], second[TILE_WORDS];
        apply(loops, &groups[0], 4, ADD, (const u8 *)m, (u8 *)first, start, size, &next[0]);
        loops->second_moment(first, m, v, rule.inverse, rule.beta2, rule.weight2, second, size);
        apply(loops, &groups[1], 4, ADD, (const u8 *)second, (u8 *)second, start, size, &next[1]);
        loops->move(rule.divide, w, first, second, rule.shrink, rule.root, rule.eps, rule.rate, size);
        apply(loops, &groups[2], 4, ADD, (const u8 *)w, (u8 *)w, start, size, &next[2]);
        memcpy(m, first, size * sizeof *first);
        memcpy(v, second, size * sizeof *second);
    }
    if (r.state)
        PyEval_RestoreThread(r.state);
    return ended(&call, PyLong_FromLongLong(r.failed ? -1 : (long long)r.at));
}

/* The numbers of a step with a gradient, from position `reals` of the arguments and four integers. */
static struct adam step_of(const struct call *call, const struct array *scales)
{
    const double *real = call->reals;
    struct adam rule = {.variant = (int)call->ints[0], .near = (int)call->ints[1], .maximize = (int)call->ints[2],
                        .share = (float)real[0], .beta2 = (float)real[1], .weight2 = real[2], .shrink = (float)real[3],
                        .root = (float)real[4], .eps = (float)real[5], .rate = (float)real[6], .scales = scales->count};
    rule.divide = rule.variant == DIVIDE;
    memcpy(rule.scale, scales->at, scales->bytes);
    return rule;
}

static int is_step(const struct call *call, const struct array *scales)
{
    return call->ints[0] >= FMA && call->ints[0] <= DIVIDE && (call->ints[1] | 1) == 1 && (call->ints[2] | 1) == 1 &&
           scales->item == 4 && scales->count <= 4;
}

/* step_adam(weight, first, second, gradient, variant, near, maximize, scales, share, beta2, weight2, shrink, root, eps,
 *           rate) */
FUNCTION(step_adam)
{
    BEGIN("wwwriiirfffffff")
    size_t count = a[0].count;
    for (size_t i = 0; i < 3; i++)
        NEED(a[i].item == 4 && a[i].count == count, SIZES)
    NEED((a[3].item == 4 || a[3].item == 2) && a[3].count == count, SIZES)
    NEED(all_apart(&call), OVERLAP)
    NEED(is_step(&call, &a[4]), UNKNOWN)
    struct adam rule = step_of(&call, &a[4]);
    RUN(4 * count, loops->adam_step(&rule, a[3].item, a[3].at, a[0].at, a[1].at, a[2].at, count));
    NONE;
}

/* write_replayed(old and new: weight, first, second; gradient, variant, near, maximize, scales, share, beta2, weight2,
 *                shrink, root, eps, rate, level, n_log_n, space, out, compress): the residuals of a block */
FUNCTION(write_replayed)
{
    PyObject *compress = function(args, &number, 23);
    if (compress == NULL)
        return NULL;
    BEGIN("rrrrrrriiirfffffffirww")
    size_t count = a[0].count, missed[3][2] = {{0}};
    for (size_t i = 0; i < 6; i++)
        NEED(a[i].item == 4 && a[i].count == count, SIZES)
    NEED((a[6].item == 4 || a[6].item == 2) && a[6].count == count, SIZES)
    NEED(count > 0 && count <= UINT32_MAX && a[8].item == 8 && a[8].count > SAMPLE, SIZES)
    NEED(a[9].item == 1 && a[9].count >= 11 * 4 * count + 2 * SPACE, LITTLE)
    NEED(a[10].item == 1 && a[10].count >= 3 * (4 * count + 2 * MARGIN), LITTLE)
    NEED((call.ints[3] | 1) == 1 && is_step(&call, &a[7]), UNKNOWN)
    for (size_t i = 9; i < 11; i++)
        for (size_t k = 0; k < i; k++)
            NEED(apart(&a[i], &a[k]), OVERLAP)
    struct adam rule = step_of(&call, &a[7]);
    struct coder c = {.loops = loops, .n_log_n = a[8].at, .out = a[10].at, .most = a[10].count, .space = a[9].at,
                      .size = a[9].count, .compress = compress};
    u32 *differences[3] = {(u32 *)room(&c, 4 * count), NULL, NULL};
    const f32 *old[3] = {a[0].at, a[1].at, a[2].at}, *new[3] = {a[3].at, a[4].at, a[5].at};
    c.state = count >= UNLOCKED / 4 ? PyEval_SaveThread() : NULL;
    loops->adam_replayed(&rule, a[6].item, a[6].at, old, new, differences, missed, HEAD, count);
    if (missed[1][0] + missed[1][1] + missed[2][0] + missed[2][1]) { /* seldom: only the weights may differ */
        differences[1] = (u32 *)room(&c, 4 * count);
        differences[2] = (u32 *)room(&c, 4 * count);
        memset(missed, 0, sizeof missed);
        if (!c.failed)
            loops->adam_replayed(&rule, a[6].item, a[6].at, old, new, differences, missed, HEAD, count);
    }
    for (size_t i = 0; i < 3; i++)
        put_residual(&c, differences[i], missed[i], count, (int)call.ints[3]);
    return written(&call, &c);
}

/* buffered(plain, nesterov, weight, buffer, gradient, momentum, share, rate) */
FUNCTION(buffered)
{
    BEGIN("iiwwrfff")
    NEED(floats(&call, 0), SIZES)
    NEED(all_apart(&call), OVERLAP)
    RUN(a[0].bytes,
        loops->buffered(call.ints[0] != 0, call.ints[1] != 0, a[0].at, a[1].at, a[2].at, (float)call.reals[0],
                        (float)call.reals[1], (float)call.reals[2], a[0].count));
    NONE;
}

FUNCTION(missed)
{
    BEGIN("rr")
    size_t found = 0;
    NEED(floats(&call, 0), SIZES)
    RUN(a[0].bytes, found = loops->missed(a[0].at, a[1].at, a[0].count));
    return ended(&call, PyLong_FromSize_t(found));
}

/* ----------------------------------------------------------------------------------------------- scales of runs */

/* Whether `scales` has a byte for each run of 256 of `count` numbers. */
static int runs_of(const struct array *scales, size_t count)
{
    return scales->item == 1 && scales->count == (count + 255) / 256;
}

/* mean_scales(values, second, centre, scales) */
FUNCTION(mean_scales)
{
    BEGIN("rriw")
    NEED(a[0].item == 4 && alike(&a[0], &a[1]) && runs_of(&a[2], a[0].count), SIZES)
    NEED(all_apart(&call) || a[0].at == a[1].at, OVERLAP)
    NEED(call.ints[0] >= -(1 << 30) && call.ints[0] <= 3 << 29, LIMIT)
    RUN(a[0].bytes, loops->mean_scales(a[0].at, a[1].at, (int32_t)call.ints[0], a[2].at, a[0].count));
    NONE;
}

static PyObject *moved(struct call *call, void (*loop)(const void *, const u32 *, const u8 *, void *, size_t))
{
    struct array *a = call->arrays;
    RUN(a[0].bytes, loop(a[0].at, a[1].at, a[2].at, a[3].at, a[0].count));
    return ended(call, Py_NewRef(Py_None));
}

#define MOVED(name)                                                                                                    \
    FUNCTION(name)                                                                                                     \
    {                                                                                                                  \
        BEGIN("rrrw")                                                                                                  \
        NEED((a[0].item == 2 || a[0].item == 4) && alike(&a[0], &a[3]), SIZES)                                         \
        NEED(a[1].item == 4 && a[1].count == a[0].count && runs_of(&a[2], a[0].count), SIZES)                          \
        NEED(in_place(&a[0], &a[3]) && apart(&a[1], &a[3]) && apart(&a[2], &a[3]), OVERLAP)                            \
        return moved(&call, loops->name[a[0].item == 4]);                                                              \
    }

/* away(values, second, scales, out), back(words, second, scales, out) */
MOVED(away)
MOVED(back)
#undef MOVED

/* classes(base, second, scales, labels, counts): counts has four rows of 16 */
FUNCTION(classes)
{
    BEGIN("rrrww")
    NEED(a[0].item == 4 && alike(&a[0], &a[1]) && runs_of(&a[2], a[0].count), SIZES)
    NEED(a[3].item == 1 && a[3].count == a[0].count && a[4].item == 8 && a[4].count == 4 * 16, SIZES)
    NEED(apart(&a[0], &a[3]) && apart(&a[1], &a[3]) && apart(&a[2], &a[3]), OVERLAP)
    for (size_t i = 0; i < 4; i++)
        NEED(apart(&a[i], &a[4]), OVERLAP)
    NEED(a[0].count <= UINT32_MAX, SIZES)
    RUN(a[0].bytes, {
        size_t quarter = a[0].count / 4;
        u8 *labels = a[3].at;
        i64 *counts = a[4].at;
        loops->classes(a[0].at, a[1].at, a[2].at, labels, a[0].count);
        for (size_t row = 0; row < 4; row++) {
            uint32_t found[256];
            loops->histogram(labels + row * quarter, row < 3 ? quarter : a[0].count - 3 * quarter, found);
            for (size_t k = 0; k < 16; k++)
                counts[16 * row + k] = found[k];
        }
    });
    NONE;
}

FUNCTION(changes)
{
    BEGIN("rrw")
    NEED(floats(&call, 0), SIZES)
    NEED(in_place(&a[0], &a[2]) && in_place(&a[1], &a[2]), OVERLAP)
    RUN(a[0].bytes, loops->changes(a[0].at, a[1].at, a[2].at, a[2].count));
    NONE;
}

/* unsorted_changes(words, labels, counts, base, out) */
FUNCTION(unsorted_changes)
{
    BEGIN("rrrrw")
    uint64_t places[4][256];
    int sorted = 0;
    NEED(a[0].item == 4 && alike(&a[0], &a[4]) && alike(&a[3], &a[4]) && counted(&a[1], &a[2], &a[0]), SIZES)
    NEED(apart(&a[0], &a[4]) && apart(&a[1], &a[4]) && apart(&a[2], &a[4]) && in_place(&a[3], &a[4]), OVERLAP)
    NEED(first_places(&a[2], a[0].count, places), COUNTS)
    RUN(a[0].bytes, sorted = loops->unsorted_changes(a[0].at, a[1].at, places, a[3].at, a[4].at, a[0].count));
    NEED(sorted, COUNTS)
    NONE;
}

/* scaled(values, factor, out) */
FUNCTION(scaled)
{
    BEGIN("rfw")
    NEED(floats(&call, 0), SIZES)
    NEED(in_place(&a[0], &a[1]), OVERLAP)
    RUN(a[0].bytes, loops->scaled(a[0].at, (float)call.reals[0], a[1].at, a[1].count));
    NONE;
}

/* ------------------------------------------------------------------------------------------------------- digest */

/* block_sums(words, skip, weights, sums): a block has as many words as there are weights */
FUNCTION(block_sums)
{
    BEGIN("rirw")
    size_t block = a[1].count, skip = (size_t)call.ints[0], count = a[0].count;
    NEED(a[0].item == 4 && a[1].item == 8 && a[2].item == 8 && block > 0 && skip < block, SIZES)
    NEED(a[2].count == (skip + count + block - 1) / block, SIZES)
    NEED(apart(&a[0], &a[2]) && apart(&a[1], &a[2]), OVERLAP)
    RUN(a[0].bytes, {
        const u32 *words = a[0].at;
        const u64 *weights = a[1].at;
        u64 *sums = a[2].at;
        size_t at = 0, one = 0;
        while (one < a[2].count) {
            if (!skip && count - at >= 4 * block) {
                loops->four_sums(words + at, block, weights, block, sums + one);
                at += 4 * block;
                one += 4;
                continue;
            }
            size_t size = block - skip < count - at ? block - skip : count - at;
            sums[one++] = loops->sum(words + at, weights + skip, size);
            at += size;
            skip = 0;
        }
    });
    NONE;
}

/* piece_sums(words, ends, weights, sums) */
FUNCTION(piece_sums)
{
    BEGIN("rrrw")
    const i64 *ends = a[1].at;
    int64_t before = 0;
    NEED(a[0].item == 4 && a[1].item == 8 && a[2].item == 8 && a[3].item == 8 && a[1].count == a[3].count, SIZES)
    NEED(apart(&a[0], &a[3]) && apart(&a[1], &a[3]) && apart(&a[2], &a[3]), OVERLAP)
    for (size_t i = 0; i < a[1].count; before = ends[i++])
        NEED(ends[i] >= before && (uint64_t)ends[i] <= a[0].count && (uint64_t)(ends[i] - before) <= a[2].count,
             "a piece ends before it begins, after the words, or after the weights")
    int changed = 0;
    RUN(a[0].bytes, {
        const u32 *words = a[0].at;
        u64 *sums = a[3].at;
        size_t at = 0;
        for (size_t i = 0; i < a[3].count && !changed; i++) {
            int64_t end = ((const volatile i64 *)ends)[i]; /* read only once: another thread may write it in between */
            changed = end < (int64_t)at || (uint64_t)end > a[0].count || (uint64_t)end - at > a[2].count;
            if (!changed) {
                sums[i] = loops->sum(words + at, a[2].at, (size_t)end - at);
                at = (size_t)end;
            }
        }
    });
    NEED(!changed, "the ends of pieces were changed meanwhile")
    NONE;
}

/* ------------------------------------------------------------------------------------------------------- copies */

FUNCTION(stream)
{
    BEGIN("rw")
    NEED(a[0].bytes == a[1].bytes, SIZES)
    NEED(apart(&a[0], &a[1]), OVERLAP)
    if (a[0].bytes)
        RUN(a[0].bytes, stream_copy(a[1].at, a[0].at, a[0].bytes));
    NONE;
}

/* moves(to, at, lengths, past): the addresses are the caller's */
FUNCTION(moves)
{
    BEGIN("rrri")
    const i64 *to = a[0].at, *at = a[1].at, *lengths = a[2].at;
    size_t bytes = 0;
    NEED(a[0].item == 8 && alike(&a[0], &a[1]) && alike(&a[0], &a[2]), SIZES)
    for (size_t i = 0; i < a[2].count; i++) {
        NEED(lengths[i] >= 0, "a length is negative")
        bytes += (size_t)lengths[i];
    }
    RUN(bytes, for (size_t i = 0; i < a[2].count; i++) {
        char *target = (char *)(uintptr_t)to[i];
        const char *source = (const char *)(uintptr_t)at[i];
        if (!lengths[i])
            continue; /* its addresses may be null */
        if (lengths[i] < call.ints[0])
            memcpy(target, source, (size_t)lengths[i]);
        else
            stream_copy(target, source, (size_t)lengths[i]);
    });
    NONE;
}

/* ---------------------------------------------------------------------------------------------- instruction sets */

FUNCTION(sets)
{
    BEGIN("")
    PyObject *found = PyTuple_New((Py_ssize_t)usable_count);
    for (size_t i = 0; found && i < usable_count; i++)
        PyTuple_SetItem(found, (Py_ssize_t)i, PyUnicode_FromString(usable[i]->name));
    return found;
}

FUNCTION(selected)
{
    BEGIN("")
    return PyUnicode_FromString(loops->name);
}

FUNCTION(select)
{
    (void)self;
    if (number != 1)
        return PyErr_Format(PyExc_TypeError, "expected one argument");
    for (size_t i = 0; i < usable_count; i++) {
        PyObject *name = PyUnicode_FromString(usable[i]->name);
        int same = name ? PyObject_RichCompareBool(name, args[0], Py_EQ) : -1;
        Py_XDECREF(name);
        if (same < 0)
            return NULL;
        if (same) {
            chosen = usable[i];
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "this processor has no instruction set %R", args[0]);
}

#define METHOD(name, function, text) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, PyDoc_STR(text)}
#define KERNEL(name) METHOD(#name, py_##name, "See the kernel of this name in numpy.")

static PyMethodDef methods[] = {
    KERNEL(difference),
    KERNEL(zigzag),
    KERNEL(rotate_left),
    KERNEL(split),
    KERNEL(combine),
    KERNEL(pack_small),
    KERNEL(unpack_small),
    KERNEL(find_exceptions),
    KERNEL(take_exceptions),
    KERNEL(put_exceptions),
    KERNEL(survey),
    KERNEL(survey_packed),
    KERNEL(literals),
    KERNEL(read_literals),
    KERNEL(write_group),
    KERNEL(write_chunks),
    KERNEL(read_group),
    KERNEL(classify),
    KERNEL(sort),
    KERNEL(add_unsorted),
    KERNEL(to_bfloat16),
    KERNEL(to_float16),
    KERNEL(fma),
    KERNEL(moments),
    KERNEL(second_moment),
    KERNEL(move),
    KERNEL(write_adam),
    KERNEL(step_adam),
    KERNEL(write_replayed),
    KERNEL(read_adam),
    KERNEL(buffered),
    KERNEL(missed),
    KERNEL(mean_scales),
    KERNEL(away),
    KERNEL(back),
    KERNEL(classes),
    KERNEL(changes),
    KERNEL(unsorted_changes),
    KERNEL(scaled),
    KERNEL(block_sums),
    KERNEL(piece_sums),
    KERNEL(stream),
    KERNEL(moves),
    METHOD("sets", py_sets, "The instruction sets that can be selected, the best last."),
    METHOD("selected", py_selected, "The instruction set in use."),
    METHOD("select", py_select, "Use another instruction set in this process, for tests. Raises ValueError."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "core",
    .m_doc = PyDoc_STR("The compiled forms of the hot kernels (native/module.c)."),
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_core(void)
{
    if (!usable_count)
        look_at_the_processor();
    return PyModule_Create(&definition);
}
