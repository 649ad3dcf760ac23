/* Copies of ragged rows at the speed of memory, for any dtype: a token is `step` bytes. And integers made narrower.
 *
 * Callers have checked all sizes, and hold the memory whose addresses they give. Plain C, so that any compiler will do.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__GNUC__)
#define READ_SOON(address) __builtin_prefetch(address)
#else
#define READ_SOON(address) ((void)(address))
#endif

/* The build is for any processor of its kind; this adds a version for newer ones, chosen when the library loads. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FOR_NEWER_TOO __attribute__((target_clones("avx2", "default")))
#else
#define FOR_NEWER_TOO
#endif

enum { LINE_BYTES = 64, LINES_AHEAD = 4, ROWS_AHEAD = 2 };

/* Rows that lie apart start outside what the processor fetches by itself. */
static void fetch_row(const char *row)
{
    for (int line = 0; line < LINES_AHEAD; line++)
        READ_SOON(row + line * LINE_BYTES);
}

/* Padded rows back to back: row i is the first offsets[i + 1] - offsets[i] tokens at padded + i * row_step. */
static void strip(const char *padded, int64_t row_step, const int64_t *offsets, int64_t rows, int64_t step, char *out)
{
    for (int64_t i = 0; i < rows; i++) {
        if (i + ROWS_AHEAD < rows)
            fetch_row(padded + (i + ROWS_AHEAD) * row_step);
        memcpy(out + offsets[i] * step, padded + i * row_step, (size_t)((offsets[i + 1] - offsets[i]) * step));
    }
}

/* Rows back to back as rows of `span` bytes, the rest of each from `filler`; filler 0: zeros. */
static void pad(const char *values, const int64_t *offsets, int64_t rows, int64_t step, int64_t span,
                  const char *filler, char *out)
{
    for (int64_t i = 0; i < rows; i++, out += span) {
        size_t size = (size_t)((offsets[i + 1] - offsets[i]) * step), rest = (size_t)span - size;
        memcpy(out, values + offsets[i] * step, size);
        if (filler)
            memcpy(out + size, filler, rest);
        else
            memset(out + size, 0, rest);
    }
}

/* Bytes that nobody reads soon: written past the caches, which spares fetching each line of `out` before it is written. */
static void copy(const char *from, int64_t bytes, char *out)
{
#if defined(__SSE2__)
    enum { WIDE = sizeof(__m128i), AHEAD = 8 * LINE_BYTES };
    const int64_t to_aligned = -(intptr_t)out & (WIDE - 1), head = to_aligned < bytes ? to_aligned : bytes;
    memcpy(out, from, (size_t)head);
    from += head, out += head, bytes -= head;
    for (; bytes >= LINE_BYTES; from += LINE_BYTES, out += LINE_BYTES, bytes -= LINE_BYTES) {
        READ_SOON(from + AHEAD);
        for (int i = 0; i < LINE_BYTES; i += WIDE)
            _mm_stream_si128((__m128i *)(out + i), _mm_loadu_si128((const __m128i *)(from + i)));
    }
    _mm_sfence();
#endif
    memcpy(out, from, (size_t)bytes);
}

/* The spans of lengths[i] tokens from token starts[i] on, back to back. */
static void gather(const char *values, const int64_t *starts, const int64_t *lengths, int64_t spans,
                     int64_t step, char *out)
{
    for (int64_t i = 0; i < spans; i++) {
        size_t size = (size_t)(lengths[i] * step);
        if (i + ROWS_AHEAD < spans)
            fetch_row(values + starts[i + ROWS_AHEAD] * step);
        memcpy(out, values + starts[i] * step, size);
        out += size;
    }
}

/* Entries that are looked at together: they stay in the fastest cache. */
enum { BLOCK_ENTRIES = 2048 };

/* Integers in another width, in rows of `width` entries, BLOCK_ENTRIES at most. Returns 0 if all are in -1 .. limit - 1,
 * for which -1 becomes the highest pattern, and each row is -1 throughout or nowhere. Few blocks have a -1, and only in
 * those neighbours are compared: `inner` has all bits set but at the last entry of each row. */
#define NARROW(from, to)                                                                                       \
    FOR_NEWER_TOO static int narrow_##from##_##to(const int##from##_t *given, int64_t rows, int64_t width,      \
                                                 int64_t limit, uint##to##_t *out)                             \
    {                                                                                                          \
        const uint##from##_t most = (uint##from##_t)limit;                                                     \
        const int64_t step = BLOCK_ENTRIES / width * width;                                                    \
        uint##from##_t outside = 0;                                                                            \
        int##from##_t mixed = 0, inner[BLOCK_ENTRIES];                                                         \
        for (int64_t i = 0; i < step; i++)                                                                     \
            inner[i] = -1;                                                                                     \
        for (int64_t i = width - 1; i < step; i += width)                                                      \
            inner[i] = 0;                                                                                      \
        for (int64_t count = rows * width; count > 0; count -= step, given += step, out += step) {             \
            const int64_t block = count < step ? count : step;                                                 \
            int##from##_t signs = 0;                                                                           \
            for (int64_t i = 0; i < block; i++) {                                                              \
                outside |= (uint##from##_t)((uint##from##_t)((uint##from##_t)given[i] + 1) > most);            \
                signs |= given[i];                                                                             \
                out[i] = (uint##to##_t)given[i];                                                               \
            }                                                                                                  \
            if (signs < 0)                                                                                     \
                for (int64_t i = 0; i + 1 < block; i++)                                                        \
                    mixed |= (given[i] ^ given[i + 1]) & inner[i];                                             \
        }                                                                                                      \
        return outside || mixed < 0;                                                                           \
    }

NARROW(16, 8)
NARROW(32, 8)
NARROW(64, 8)
NARROW(32, 16)
NARROW(64, 16)

static PyObject *py_pad(PyObject *self, PyObject *args)
{
    unsigned long long values, offsets, out;
    long long rows, step, span;
    const char *filler;
    Py_ssize_t filler_bytes;
    if (!PyArg_ParseTuple(args, "KKLLLz#K", &values, &offsets, &rows, &step, &span, &filler, &filler_bytes, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pad((const char *)(uintptr_t)values, (const int64_t *)(uintptr_t)offsets, rows, step, span, filler,
        (char *)(uintptr_t)out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_strip(PyObject *self, PyObject *args)
{
    unsigned long long padded, offsets, out;
    long long row_step, rows, step;
    if (!PyArg_ParseTuple(args, "KLKLLK", &padded, &row_step, &offsets, &rows, &step, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    strip((const char *)(uintptr_t)padded, row_step, (const int64_t *)(uintptr_t)offsets, rows, step,
          (char *)(uintptr_t)out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_gather(PyObject *self, PyObject *args)
{
    unsigned long long values, starts, lengths, out;
    long long spans, step;
    if (!PyArg_ParseTuple(args, "KKKLLK", &values, &starts, &lengths, &spans, &step, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    gather((const char *)(uintptr_t)values, (const int64_t *)(uintptr_t)starts, (const int64_t *)(uintptr_t)lengths,
           spans, step, (char *)(uintptr_t)out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_copy(PyObject *self, PyObject *args)
{
    unsigned long long source, out;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KLK", &source, &bytes, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    copy((const char *)(uintptr_t)source, bytes, (char *)(uintptr_t)out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_narrow(PyObject *self, PyObject *args)
{
    unsigned long long given, out;
    long long rows, width, limit;
    int from, to, refused = 1;
    if (!PyArg_ParseTuple(args, "KiLLLKi", &given, &from, &rows, &width, &limit, &out, &to))
        return NULL;
    if (width < 1 || width > BLOCK_ENTRIES)
        Py_RETURN_FALSE;
    const void *in = (const void *)(uintptr_t)given;
    void *target = (void *)(uintptr_t)out;
    Py_BEGIN_ALLOW_THREADS
    if (from == 2 && to == 1)
        refused = narrow_16_8(in, rows, width, limit, target);
    else if (from == 4 && to == 1)
        refused = narrow_32_8(in, rows, width, limit, target);
    else if (from == 8 && to == 1)
        refused = narrow_64_8(in, rows, width, limit, target);
    else if (from == 4 && to == 2)
        refused = narrow_32_16(in, rows, width, limit, target);
    else if (from == 8 && to == 2)
        refused = narrow_64_16(in, rows, width, limit, target);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!refused);
}

static PyMethodDef methods[] = {
    {"pad", py_pad, METH_VARARGS, NULL},
    {"strip", py_strip, METH_VARARGS, NULL},
    {"gather", py_gather, METH_VARARGS, NULL},
    {"copy", py_copy, METH_VARARGS, NULL},
    {"narrow", py_narrow, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ragged", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__ragged(void) { return PyModule_Create(&module); }
