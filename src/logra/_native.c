/* SPDX-License-Identifier: Apache-2.0
 *
 * Philox4x32-10 (Salmon et al., SC 2011) and the rounding that consumes its bits, on memory owned by
 * the caller. Everything here gives the same bits as the plain tensor code in random_bits.py and
 * optim/rounding.py, only faster; the package works without it. Integer arithmetic only.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#define LANES 16 /* counters advanced together, so that the compiler can use vector registers */

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

typedef struct {
    uint64_t key;
    uint32_t purpose, update;
} stream;

/* One row of a stream: 4 * blocks words; room for a multiple of LANES blocks must be there. */
FOR_EACH_CPU
static void fill_row(uint32_t *restrict out, int64_t blocks, uint32_t row, uint32_t first_block, uint32_t key_low,
                     uint32_t key_high, uint32_t purpose, uint32_t update)
{
    for (int64_t start = 0; start < blocks; start += LANES) {
        uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
        uint32_t k0 = key_low, k1 = key_high;
        for (int l = 0; l < LANES; l++) {
            c0[l] = first_block + (uint32_t)(start + l);
            c1[l] = row;
            c2[l] = update;
            c3[l] = purpose;
        }
        for (int round = 0; round < 10; round++) {
            for (int l = 0; l < LANES; l++) {
                uint64_t p0 = (uint64_t)0xD2511F53u * c0[l];
                uint64_t p1 = (uint64_t)0xCD9E8D57u * c2[l];
                c0[l] = (uint32_t)(p1 >> 32) ^ c1[l] ^ k0;
                c1[l] = (uint32_t)p1;
                c2[l] = (uint32_t)(p0 >> 32) ^ c3[l] ^ k1;
                c3[l] = (uint32_t)p0;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        int64_t count = blocks - start < LANES ? blocks - start : LANES;
        for (int64_t l = 0; l < count; l++) {
            uint32_t *word = out + 4 * (start + l);
            word[0] = c0[l];
            word[1] = c1[l];
            word[2] = c2[l];
            word[3] = c3[l];
        }
    }
}

static void fill_stream(void *out, int64_t blocks, int64_t row, int64_t first_block, stream s)
{
    fill_row((uint32_t *)out, blocks, (uint32_t)row, (uint32_t)first_block, (uint32_t)s.key, (uint32_t)(s.key >> 32),
             s.purpose, s.update);
}

/* The loops below work on one row; see optim/rounding.py for what each of them means. */

FOR_EACH_CPU
static void split_read_row(const uint16_t *restrict upper, const uint8_t *restrict low, const uint8_t *restrict dither,
                           uint32_t *restrict value, int64_t columns)
{
    for (int64_t j = 0; j < columns; j++)
        value[j] = (((uint32_t)upper[j] << 16) | ((uint32_t)low[j] << 8)) - ((uint32_t)dither[j] << 8);
}

FOR_EACH_CPU
static void split_round_row(uint32_t *restrict value, const uint8_t *restrict noise, const uint8_t *restrict dither,
                            uint16_t *restrict upper, uint8_t *restrict low, int64_t columns)
{
    for (int64_t j = 0; j < columns; j++) {
        uint32_t kept = (value[j] + noise[j]) & ~0xFFu;
        uint32_t shifted = kept + ((uint32_t)dither[j] << 8);
        value[j] = kept;
        upper[j] = (uint16_t)(shifted >> 16);
        low[j] = (uint8_t)(shifted >> 8);
    }
}

FOR_EACH_CPU
static void floor_row(const uint32_t *restrict value, const uint16_t *restrict noise, uint16_t *restrict upper,
                      int64_t columns)
{
    for (int64_t j = 0; j < columns; j++)
        upper[j] = (uint16_t)((value[j] + noise[j]) >> 16);
}

/* bf16 nearest and the low 16 bits of fp32 values, as sync/held.py keeps them; how many were rounded up from a tie. */
FOR_EACH_CPU
static int64_t nearest_write_row(const uint32_t *restrict value, uint16_t *restrict upper, uint16_t *restrict low,
                                 int64_t columns)
{
    int64_t raised = 0;
    for (int64_t j = 0; j < columns; j++) {
        uint32_t v = value[j], odd = (v >> 16) & 1;
        upper[j] = (uint16_t)((v + 0x7FFFu + odd) >> 16);
        low[j] = (uint16_t)v;
        raised += ((v & 0xFFFFu) == 0x8000u) & odd;
    }
    return raised;
}

FOR_EACH_CPU
static void nearest_read_row(const uint16_t *restrict upper, const uint16_t *restrict low, uint32_t *restrict value,
                             int64_t columns)
{
    for (int64_t j = 0; j < columns; j++)
        value[j] = (((uint32_t)upper[j] - (low[j] > 0x8000u)) << 16) | low[j];
}

static void *row_buffer(int64_t bytes)
{
    int64_t group = 16 * LANES;
    return malloc((size_t)((bytes + group - 1) / group * group + group));
}

static PyObject *native_fill(PyObject *self, PyObject *args)
{
    unsigned long long out, key;
    long long rows, blocks, first_row, first_block, purpose, update;
    (void)self;
    if (!PyArg_ParseTuple(args, "KLLLLKLL", &out, &rows, &blocks, &first_row, &first_block, &key, &purpose, &update))
        return NULL;
    stream s = {key, (uint32_t)purpose, (uint32_t)update};
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < rows; i++)
        fill_stream((uint32_t *)(uintptr_t)out + i * blocks * 4, blocks, first_row + i, first_block, s);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *native_split_read(PyObject *self, PyObject *args)
{
    unsigned long long upper, low, value, key;
    long long rows, columns, first_row, purpose;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKLLLKL", &upper, &low, &value, &rows, &columns, &first_row, &key, &purpose))
        return NULL;
    stream s = {key, (uint32_t)purpose, 0};
    void *dither = row_buffer(columns);
    if (dither == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < rows; i++) {
        fill_stream(dither, (columns + 15) / 16, first_row + i, 0, s);
        split_read_row((uint16_t *)(uintptr_t)upper + i * columns, (uint8_t *)(uintptr_t)low + i * columns, dither,
                       (uint32_t *)(uintptr_t)value + i * columns, columns);
    }
    Py_END_ALLOW_THREADS
    free(dither);
    Py_RETURN_NONE;
}

static PyObject *native_split_round(PyObject *self, PyObject *args)
{
    unsigned long long value, upper, low, key;
    long long rows, columns, first_row, noise_purpose, update, dither_purpose;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKLLLKLLL", &value, &upper, &low, &rows, &columns, &first_row, &key, &noise_purpose,
                          &update, &dither_purpose))
        return NULL;
    stream noise_stream = {key, (uint32_t)noise_purpose, (uint32_t)update};
    stream dither_stream = {key, (uint32_t)dither_purpose, 0};
    void *noise = row_buffer(columns), *dither = row_buffer(columns);
    if (noise == NULL || dither == NULL) {
        free(noise);
        free(dither);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < rows; i++) {
        fill_stream(noise, (columns + 15) / 16, first_row + i, 0, noise_stream);
        fill_stream(dither, (columns + 15) / 16, first_row + i, 0, dither_stream);
        split_round_row((uint32_t *)(uintptr_t)value + i * columns, noise, dither,
                        (uint16_t *)(uintptr_t)upper + i * columns, (uint8_t *)(uintptr_t)low + i * columns, columns);
    }
    Py_END_ALLOW_THREADS
    free(noise);
    free(dither);
    Py_RETURN_NONE;
}

static PyObject *native_floor(PyObject *self, PyObject *args)
{
    unsigned long long value, upper, key;
    long long rows, columns, first_row, purpose, update;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKLLLKLL", &value, &upper, &rows, &columns, &first_row, &key, &purpose, &update))
        return NULL;
    stream s = {key, (uint32_t)purpose, (uint32_t)update};
    void *noise = row_buffer(2 * columns);
    if (noise == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < rows; i++) {
        fill_stream(noise, (columns + 7) / 8, first_row + i, 0, s);
        floor_row((uint32_t *)(uintptr_t)value + i * columns, noise, (uint16_t *)(uintptr_t)upper + i * columns,
                  columns);
    }
    Py_END_ALLOW_THREADS
    free(noise);
    Py_RETURN_NONE;
}

#define DIGEST_ROW(name, bits_type)                                                                                    \
    FOR_EACH_CPU                                                                                                       \
    static uint64_t name(const bits_type *restrict bits, int64_t columns, uint64_t start)                              \
    {                                                                                                                  \
        uint64_t total = 0;                                                                                            \
        for (int64_t j = 0; j < columns; j++) {                                                                        \
            uint64_t h = start + (uint64_t)j * 0x9E3779B97F4A7C15u + (uint64_t)bits[j] * 0xC2B2AE3D27D4EB4Fu;          \
            h ^= h >> 32;                                                                                              \
            h *= 0xD6E8FEB86659FD93u;                                                                                  \
            total += h ^ (h >> 29);                                                                                    \
        }                                                                                                              \
        return total;                                                                                                  \
    }

DIGEST_ROW(digest_row16, uint16_t)
DIGEST_ROW(digest_row32, uint32_t)

static PyObject *native_digest(PyObject *self, PyObject *args)
{
    unsigned long long values, start;
    long long rows, columns, total_columns, width;
    uint64_t total = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "KLLLLK", &values, &rows, &columns, &total_columns, &width, &start))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < rows; i++) {
        uint64_t row = start + (uint64_t)(i * total_columns) * 0x9E3779B97F4A7C15u;
        if (width == 2)
            total += digest_row16((const uint16_t *)(uintptr_t)values + i * columns, columns, row);
        else
            total += digest_row32((const uint32_t *)(uintptr_t)values + i * columns, columns, row);
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(total);
}

static PyObject *native_nearest_write(PyObject *self, PyObject *args)
{
    unsigned long long value, upper, low, places;
    long long count, room, found = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKLKL", &value, &upper, &low, &count, &places, &room))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t start = 0; start < count; start += 4096) {
        const uint32_t *part = (uint32_t *)(uintptr_t)value + start;
        int64_t size = count - start < 4096 ? count - start : 4096;
        if (!nearest_write_row(part, (uint16_t *)(uintptr_t)upper + start, (uint16_t *)(uintptr_t)low + start, size))
            continue;
        for (int64_t j = 0; j < size; j++)
            if ((part[j] & 0x1FFFFu) == 0x18000u) {
                if (found < room)
                    ((int64_t *)(uintptr_t)places)[found] = start + j;
                found++;
            }
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(found);
}

static PyObject *native_nearest_read(PyObject *self, PyObject *args)
{
    unsigned long long upper, low, value;
    long long count;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKL", &upper, &low, &value, &count))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    nearest_read_row((uint16_t *)(uintptr_t)upper, (uint16_t *)(uintptr_t)low, (uint32_t *)(uintptr_t)value, count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fill", native_fill, METH_VARARGS, "fill(out, rows, blocks, first_row, first_block, key, purpose, update)"},
    {"split_read", native_split_read, METH_VARARGS,
     "split_read(upper, low, value, rows, columns, first_row, key, dither_purpose)"},
    {"split_round", native_split_round, METH_VARARGS,
     "split_round(value, upper, low, rows, columns, first_row, key, noise_purpose, update, dither_purpose)"},
    {"floor", native_floor, METH_VARARGS, "floor(value, upper, rows, columns, first_row, key, purpose, update)"},
    {"nearest_write", native_nearest_write, METH_VARARGS, "nearest_write(value, upper, low, count, places, room)"},
    {"nearest_read", native_nearest_read, METH_VARARGS, "nearest_read(upper, low, value, count)"},
    {"digest", native_digest, METH_VARARGS, "digest(values, rows, columns, total_columns, width, start)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
