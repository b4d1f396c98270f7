/* SPDX-License-Identifier: Apache-2.0
 *
 * Philox4x32-10 (Salmon et al., SC 2011), filled into caller-owned memory. It gives the same
 * words as the plain tensor code in random_bits.py, only faster; the package works without it.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define LANES 16 /* counters advanced together, so that the compiler can use vector registers */

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

/* out[row][4 * block + word] for `rows` rows and `blocks` blocks of four words. */
FOR_EACH_CPU
static void fill(uint32_t *out, int64_t rows, int64_t blocks, uint32_t first_row, uint32_t first_block,
                 uint32_t update, uint32_t purpose, uint32_t key_low, uint32_t key_high)
{
    for (int64_t row = 0; row < rows; row++) {
        uint32_t *line = out + row * blocks * 4;
        for (int64_t start = 0; start < blocks; start += LANES) {
            uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
            uint32_t k0 = key_low, k1 = key_high;
            for (int l = 0; l < LANES; l++) {
                c0[l] = first_block + (uint32_t)(start + l);
                c1[l] = first_row + (uint32_t)row;
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
                uint32_t *word = line + 4 * (start + l);
                word[0] = c0[l];
                word[1] = c1[l];
                word[2] = c2[l];
                word[3] = c3[l];
            }
        }
    }
}

static PyObject *philox_fill(PyObject *self, PyObject *args)
{
    unsigned long long address, key;
    long long rows, blocks, first_row, first_block, update, purpose;
    (void)self;
    if (!PyArg_ParseTuple(args, "KLLLLLLK", &address, &rows, &blocks, &first_row, &first_block, &update, &purpose,
                          &key))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fill((uint32_t *)(uintptr_t)address, rows, blocks, (uint32_t)first_row, (uint32_t)first_block, (uint32_t)update,
         (uint32_t)purpose, (uint32_t)key, (uint32_t)(key >> 32));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fill", philox_fill, METH_VARARGS,
     "fill(address, rows, blocks, first_row, first_block, update, purpose, key): write Philox words to memory."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_philox", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__philox(void) { return PyModule_Create(&module); }
