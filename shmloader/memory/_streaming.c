/* Copies rows into memory that this process will not read again.
 *
 * An ordinary store makes the processor read the cache line that is about to be overwritten, and
 * push other data out of the caches. A streaming store does neither. SSE2, which every x86-64 has,
 * is enough: the processor joins four stores into one line. On other processors this is memcpy.
 *
 * setup.py defines Py_LIMITED_API, except for free-threaded Python, which has no limited API.
 */
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

#define LINE 64

static void copy_row(char *to, const char *from, size_t nbytes)
{
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, nbytes);
}

static void finish(void) { _mm_sfence(); }
#else
static void copy_row(char *to, const char *from, size_t nbytes) { memcpy(to, from, nbytes); }
static void finish(void) {}
#endif

static PyObject *copy_rows(PyObject *module, PyObject *args)
{
    unsigned long long target;
    PyObject *sources;
    Py_ssize_t row_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "KO!n", &target, &PyList_Type, &sources, &row_bytes))
        return NULL;
    Py_ssize_t count = PyList_Size(sources);
    uintptr_t *rows = PyMem_Malloc((size_t)(count + 1) * sizeof *rows);
    if (rows == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        rows[i] = (uintptr_t)PyLong_AsUnsignedLongLong(PyList_GetItem(sources, i));
        if (PyErr_Occurred()) {
            PyMem_Free(rows);
            return NULL;
        }
    }
    char *to = (char *)(uintptr_t)target;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++, to += row_bytes)
        copy_row(to, (const char *)rows[i], (size_t)row_bytes);
    finish();
    Py_END_ALLOW_THREADS
    PyMem_Free(rows);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(target, sources, row_bytes)\n--\n\n"
     "Copy row_bytes from each address in the list sources, one after the other, to target."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    /* Nothing here is shared between calls. Without this, an import would enable the GIL. */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_streaming", "Copies that leave the caches alone.", 0,
    methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__streaming(void) { return PyModuleDef_Init(&definition); }
