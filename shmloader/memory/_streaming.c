/* Copies many samples in one call, and receives messages.
 *
 * copy_rows writes large rows, which this process will not read again, past the caches.
 * gather_fields finds rows of arrays by their numbers, copies them, and converts what is in them.
 * find_lists finds lists of an Arrow table, which gather_fields copies if they have one length.
 * copy_sequences writes samples of different lengths, and fills what is between them.
 * receive_one looks for a message some times; in Python each vain look would cost an exception.
 * receive_each does so with several sockets.
 *
 * An ordinary store makes the processor read the cache line that is about to be overwritten, and
 * push other data out of the caches. A streaming store does neither. SSE2, which every x86-64 has,
 * is enough: the processor joins four stores into one line. On other processors this is memcpy.
 *
 * setup.py defines Py_LIMITED_API, except for free-threaded Python, which has no limited API.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

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

/* Copies, or converts, so many elements. */
typedef void copier(char *to, const char *from, size_t count);

static void copy_bytes(char *to, const char *from, size_t count) { memcpy(to, from, count); }

#define CONVERTER(name, FROM, TO)                                                                  \
    static void name(char *restrict to, const char *restrict from, size_t count)                   \
    {                                                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            ((TO *)to)[i] = (TO)((const FROM *)from)[i];                                           \
    }

CONVERTER(int64_of_int8, int8_t, int64_t)
CONVERTER(int64_of_uint8, uint8_t, int64_t)
CONVERTER(int64_of_int16, int16_t, int64_t)
CONVERTER(int64_of_uint16, uint16_t, int64_t)
CONVERTER(int64_of_int32, int32_t, int64_t)
CONVERTER(int64_of_uint32, uint32_t, int64_t)
CONVERTER(float_of_double, double, float)

/* What gather_fields can do, by the letters that module struct has for the two types. */
static const struct kind {
    int from, to;
    size_t from_bytes, to_bytes;
    copier *copy;
} kinds[] = {
    {'B', 'B', 1, 1, copy_bytes},     {'b', 'q', 1, 8, int64_of_int8},
    {'B', 'q', 1, 8, int64_of_uint8}, {'h', 'q', 2, 8, int64_of_int16},
    {'H', 'q', 2, 8, int64_of_uint16}, {'i', 'q', 4, 8, int64_of_int32},
    {'I', 'q', 4, 8, int64_of_uint32}, {'d', 'f', 8, 4, float_of_double},
};

/* Rows lie anywhere, and the processor foresees only what follows in a row. So the next rows are
 * fetched while one is copied: this many bytes ahead, and at most so many rows. */
#define AHEAD_BYTES 8192
#define AHEAD_ROWS 64
#define BLOCK_BYTES 256

#if defined(__GNUC__)
static void prefetch(const char *from, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i += 64)
        __builtin_prefetch(from + i);
}
#else
static void prefetch(const char *from, size_t nbytes) { (void)from, (void)nbytes; }
#endif

static int64_t index_at(const void *at, Py_ssize_t i, int is_narrow)
{
    return is_narrow ? ((const int32_t *)at)[i] : ((const int64_t *)at)[i];
}

/* Returns the kind of these types, for which all addresses are aligned; else NULL. */
static const struct kind *find_kind(int from, int to, uint64_t sources, uint64_t targets)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].from == from && kinds[i].to == to)
            return sources % kinds[i].from_bytes || targets % kinds[i].to_bytes ? NULL : kinds + i;
    return NULL;
}

/* Copies so many rows of count elements: row i is at[i] steps from first. */
static void copy_chosen(char *out, const char *first, Py_ssize_t step, Py_ssize_t count,
                        const struct kind *kind, Py_ssize_t rows, const void *at, int is_narrow,
                        int streams)
{
    const char *next;
    copier *copy = streams ? copy_row : kind->copy;
    size_t size = kind->from_bytes, left, some;
    size_t block = streams ? (size_t)count : BLOCK_BYTES / size;
    Py_ssize_t ahead = AHEAD_BYTES / (count * (Py_ssize_t)size + AHEAD_BYTES / AHEAD_ROWS) + 1;
    for (Py_ssize_t i = 0; i < rows; i++) {
        const char *row = first + index_at(at, i, is_narrow) * step;
        next = first + index_at(at, i + ahead < rows ? i + ahead : i, is_narrow) * step;
        for (left = (size_t)count; left; left -= some, row += some * size, next += some * size) {
            some = left < block ? left : block;
            if (next != row && !streams)
                prefetch(next, some * size);
            copy(out, row, some);
            out += some * kind->to_bytes;
        }
    }
    if (streams)
        finish();
}

static int64_t offset_at(const char *offsets, int64_t at, int width)
{
    return width == 4 ? ((const int32_t *)offsets)[at] : ((const int64_t *)offsets)[at];
}

/* Returns the number of a row's chunk, of those that begin at these rows. */
static int64_t find_chunk(const int64_t *starts, int64_t some, int64_t row)
{
    int64_t chunk = 0;
    for (int64_t half; some > 1; some -= half) {
        half = some / 2;
        chunk += starts[chunk + half] <= row ? half : 0;
    }
    return chunk;
}

static PyObject *find_lists(PyObject *module, PyObject *args)
{
    Py_buffer rows, chunks, found;
    unsigned long long address;
    int width;
    int64_t same = -1;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*Kiw*", &rows, &chunks, &address, &width, &found))
        return NULL;
    Py_ssize_t count = rows.len / 8, last = chunks.len / 8 / 3;
    int is_right = found.len == 2 * rows.len && last > 0;
    if (is_right) {
        const int64_t *row = rows.buf, *starts = chunks.buf;
        const int64_t *bases = starts + last, *firsts = bases + last;
        int64_t *begins = found.buf, *lengths = begins + count;
        const char *offsets = (const char *)(uintptr_t)address;
        for (Py_ssize_t i = 0; i < count; i++) {
            int64_t chunk = find_chunk(starts, last, row[i]);
            int64_t at = row[i] + bases[chunk], begin = offset_at(offsets, at, width);
            begins[i] = begin + firsts[chunk];
            lengths[i] = offset_at(offsets, at + 1, width) - begin;
            same = i == 0 || lengths[i] == same ? lengths[i] : -1;
        }
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&chunks);
    PyBuffer_Release(&found);
    if (!is_right)
        return PyErr_Format(PyExc_ValueError, "there are no chunks, or other numbers than two a row");
    return PyLong_FromLongLong(same);
}

/* A field of gather_fields. Addresses are 0 where there is nothing. */
struct field {
    int64_t offset;                                /* of the field, from the target */
    int64_t source, step, count, from, to, streams; /* see gather_fields */
    int64_t mapping;                               /* the row of each index: int64 */
    int64_t chunks, chunk_count;                   /* as find_lists has them */
    int64_t offsets, width;                        /* the same; without offsets, a row's elements */
    int64_t length;                                /* elements that each list must have */
};

/* Finds where the rows of these indices are, in steps; returns whether lists have one length. */
static int find_steps(const struct field *field, const void *at, int is_narrow, Py_ssize_t rows,
                      int64_t *found)
{
    const int64_t *mapping = (const int64_t *)(uintptr_t)field->mapping;
    const int64_t *starts = (const int64_t *)(uintptr_t)field->chunks;
    const int64_t *bases = starts + field->chunk_count, *firsts = bases + field->chunk_count;
    const char *offsets = (const char *)(uintptr_t)field->offsets;
    int width = (int)field->width, is_same = 1;
    for (Py_ssize_t i = 0; i < rows; i++) {
        int64_t row = index_at(at, i, is_narrow);
        row = field->mapping ? mapping[row] : row;
        if (field->chunks) {
            int64_t chunk = find_chunk(starts, field->chunk_count, row), begin;
            row += bases[chunk];
            begin = field->offsets ? offset_at(offsets, row, width) : row * width;
            if (field->offsets)
                is_same &= offset_at(offsets, row + 1, width) - begin == field->length;
            row = begin + firsts[chunk];
        }
        found[i] = row;
    }
    return is_same;
}

/* Gathers a field; returns 0 if that cannot be done. */
static int gather_field(const struct field *field, uint64_t target, const void *at, int is_narrow,
                        Py_ssize_t rows, int64_t *steps)
{
    uint64_t source = (uint64_t)field->source, to = target + (uint64_t)field->offset;
    const struct kind *kind =
        find_kind((int)field->from, (int)field->to, source | (uint64_t)field->step, to);
    if (kind == NULL)
        return 0;
    if (field->mapping || field->chunks) {
        if (!find_steps(field, at, is_narrow, rows, steps))
            return 0;
        at = steps, is_narrow = 0;
    }
    copy_chosen((char *)(uintptr_t)to, (const char *)(uintptr_t)source, (Py_ssize_t)field->step,
                (Py_ssize_t)field->count, kind, rows, at, is_narrow, (int)field->streams);
    return 1;
}

static PyObject *gather_fields(PyObject *module, PyObject *args)
{
    unsigned long long target;
    Py_ssize_t rows;
    Py_buffer table, at;
    (void)module;
    if (!PyArg_ParseTuple(args, "Ky*ny*", &target, &table, &rows, &at))
        return NULL;
    const struct field *fields = table.buf;
    Py_ssize_t many = table.len / (Py_ssize_t)sizeof *fields;
    int is_right = rows > 0 && (at.len == rows * 4 || at.len == rows * 8);
    int64_t *steps = is_right ? PyMem_Malloc((size_t)rows * sizeof *steps) : NULL;
    int is_done = steps != NULL;
    if (is_done) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < many && is_done; i++)
            is_done = gather_field(fields + i, target, at.buf, at.len == rows * 4, rows, steps);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(steps);
    PyBuffer_Release(&table);
    PyBuffer_Release(&at);
    if (!is_right)
        return PyErr_Format(PyExc_ValueError, "there is no int32 or int64 for each row");
    return PyBool_FromLong(is_done);
}

#ifndef Py_BEGIN_CRITICAL_SECTION /* the GIL keeps others from changing a list */
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
#endif

/* Converts the first ints of a list; returns whether all are ints of 64 bits. */
static int copy_ints(char *to, PyObject *list, Py_ssize_t count)
{
    int64_t number;
    if (count > PyList_Size(list))
        return 0;
    for (Py_ssize_t i = 0; i < count; i++, to += sizeof number) {
        PyObject *item = PyList_GetItem(list, i);
        if (!PyLong_CheckExact(item))
            return 0;
        number = PyLong_AsLongLong(item);
        if (number == -1 && PyErr_Occurred())
            return 0;
        memcpy(to, &number, sizeof number);
    }
    return 1;
}

/* Copies the first bytes of a sample; returns whether it has them in one piece. */
static int copy_sample(char *to, PyObject *sample, Py_ssize_t count, Py_ssize_t row_bytes)
{
    int is_copied;
    if (PyList_Check(sample)) {
        Py_BEGIN_CRITICAL_SECTION(sample);
        is_copied = row_bytes == sizeof(int64_t) && copy_ints(to, sample, count);
        Py_END_CRITICAL_SECTION();
        return is_copied;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(sample, &view, PyBUF_SIMPLE) < 0)
        return 0;
    is_copied = view.len / row_bytes >= count;
    if (is_copied)
        memcpy(to, view.buf, (size_t)(count * row_bytes));
    PyBuffer_Release(&view);
    return is_copied;
}

/* Repeats an item. What is written already is copied, twice as much each time. */
static void fill(char *to, size_t nbytes, const Py_buffer *item)
{
    size_t done = (size_t)item->len;
    if (done == 0 || nbytes < done)
        return;
    memcpy(to, item->buf, done);
    for (size_t more; done < nbytes; done += more) {
        more = done < nbytes - done ? done : nbytes - done;
        memcpy(to + done, to, more);
    }
}

static PyObject *copy_sequences(PyObject *module, PyObject *args)
{
    unsigned long long target;
    Py_ssize_t rows, row_bytes, end = 0;
    PyObject *samples, *result = Py_True;
    Py_buffer starts, counts, item;
    (void)module;
    if (!PyArg_ParseTuple(args, "KnnO!y*y*y*", &target, &rows, &row_bytes, &PyList_Type, &samples,
                          &starts, &counts, &item))
        return NULL;
    char *to = (char *)(uintptr_t)target;
    Py_ssize_t many = PyList_Size(samples);
    if (row_bytes < 1 || starts.len != many * 8 || counts.len != many * 8)
        result = NULL;
    for (Py_ssize_t i = 0; i < many && result == Py_True; i++) {
        int64_t start = ((int64_t *)starts.buf)[i], count = ((int64_t *)counts.buf)[i];
        if (start < end || count < 0 || count > rows - start) {
            result = NULL;
            break;
        }
        fill(to + end * row_bytes, (size_t)((start - end) * row_bytes), &item);
        if (!copy_sample(to + start * row_bytes, PyList_GetItem(samples, i), count, row_bytes))
            result = Py_False;
        end = start + count;
    }
    if (result == Py_True)
        fill(to + end * row_bytes, (size_t)((rows - end) * row_bytes), &item);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&item);
    if (result == NULL)
        PyErr_SetString(PyExc_ValueError, "sequences overlap, or do not lie inside of the target");
    else
        PyErr_Clear();
    return result == NULL ? NULL : PyBool_FromLong(result == Py_True);
}

#define NONE_YET -2
#define MOST_BYTES (1 << 15)

/* Other processes run before every so many looks. */
#define YIELD_EVERY 4

/* If looking took longer than this, other processes need the core. */
#define LONG_NS 3000000
/* Then nobody looks again for so many times as long, a second at most: who sleeps gets the core
 * back sooner. */
#define REST 32
#define MOST_REST_NS 1000000000

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether to look for a message again; may let others run first. *began_ns is 0 at first. */
static int look_again(Py_ssize_t *looks, int64_t *began_ns)
{
    static int64_t rests_until; /* threads may overwrite each other's */
    if (--*looks <= 0)
        return 0;
    if (*looks % YIELD_EVERY)
        return 1;
    int64_t now_ns = clock_ns();
    if (now_ns < __atomic_load_n(&rests_until, __ATOMIC_RELAXED))
        return 0;
    if (*began_ns == 0)
        *began_ns = now_ns;
    sched_yield(); /* a sandbox may refuse it */
    now_ns = clock_ns();
    int64_t rest_ns = REST * (now_ns - *began_ns);
    if (rest_ns > REST * LONG_NS)
        __atomic_store_n(&rests_until, now_ns + (rest_ns < MOST_REST_NS ? rest_ns : MOST_REST_NS),
                         __ATOMIC_RELAXED);
    return 1;
}

/* Returns the length of a message, 0 if the other end is closed, NONE_YET, or -1 with errno. */
static ssize_t receive_now(int fd, char *buffer)
{
    ssize_t got = recv(fd, buffer, MOST_BYTES, MSG_DONTWAIT);
    if (got < 0 && errno == ECONNRESET)
        return 0;
    return got < 0 && (errno == EAGAIN || errno == EINTR) ? NONE_YET : got;
}

/* Without PyArg_ParseTuple, which would take a sixth of a vain look's time. */
static PyObject *receive_one(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    char buffer[MOST_BYTES];
    int64_t began_ns = 0;
    (void)module;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "receive_one() takes 2 arguments (%zd given)", count);
    Py_ssize_t looks = PyLong_AsSsize_t(args[1]);
    int fd = PyErr_Occurred() ? -1 : PyObject_AsFileDescriptor(args[0]);
    if (fd < 0)
        return NULL;
    ssize_t got = receive_now(fd, buffer);
    if (got == NONE_YET && looks > 1) {
        Py_BEGIN_ALLOW_THREADS
        while (got == NONE_YET && look_again(&looks, &began_ns))
            got = receive_now(fd, buffer);
        Py_END_ALLOW_THREADS
    }
    if (got == NONE_YET)
        Py_RETURN_NONE;
    return got < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyBytes_FromStringAndSize(buffer, got);
}

static PyObject *receive_each(PyObject *module, PyObject *args)
{
    char buffer[MOST_BYTES];
    Py_buffer fds;
    Py_ssize_t looks, i;
    int ready, fd;
    int64_t began_ns = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*n", &fds, &looks))
        return NULL;
    Py_ssize_t watched = fds.len / (Py_ssize_t)sizeof fd;
    struct pollfd *polled = PyMem_Malloc((size_t)(watched + 1) * sizeof *polled);
    PyObject *found = polled == NULL ? PyErr_NoMemory() : PyList_New(0);
    for (i = 0; i < watched && polled != NULL; i++)
        polled[i] = (struct pollfd){((const int *)fds.buf)[i], POLLIN, 0};
    PyBuffer_Release(&fds);
    if (found != NULL) {
        Py_BEGIN_ALLOW_THREADS
        while ((ready = poll(polled, (nfds_t)watched, 0)) == 0 && look_again(&looks, &began_ns))
            ;
        Py_END_ALLOW_THREADS
        for (i = 0; i < watched && ready > 0; i++)
            ready = polled[i].revents & ~POLLIN ? 0 : ready;
        for (i = 0; i < watched && ready > 0 && found != NULL; i++) {
            ssize_t got = polled[i].revents ? receive_now(polled[i].fd, buffer) : NONE_YET;
            PyObject *pair = got <= 0 ? NULL : Py_BuildValue("iy#", polled[i].fd, buffer, got);
            if (got > 0 && (pair == NULL || PyList_Append(found, pair) < 0))
                Py_CLEAR(found);
            Py_XDECREF(pair);
        }
    }
    PyMem_Free(polled);
    return found;
}

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(target, sources, row_bytes)\n--\n\n"
     "Copy row_bytes from each address in the list sources, one after the other, to target."},
    {"gather_fields", gather_fields, METH_VARARGS,
     "gather_fields(target, table, rows, at)\n--\n\n"
     "Gather so many rows of several fields. table has 13 int64 for each field: its offset from\n"
     "target; the address of the first row, the bytes from one row to the next, and the elements of\n"
     "a row; the types from and to which these are converted, by their letters in module struct, of\n"
     "which \"B\" and \"B\" mean bytes; whether these are streamed past the caches; and how rows are\n"
     "found: the address of what maps indices to rows, that of the chunks of find_lists, how many\n"
     "there are, the address of the offsets, their width, and the length that all lists must have.\n"
     "With chunks but no offsets, a row has width elements. at has a row's index each, int32 or\n"
     "int64. Return whether all fields were gathered: other types and addresses that are not aligned\n"
     "cannot be."},
    {"find_lists", find_lists, METH_VARARGS,
     "find_lists(rows, chunks, offsets, width, found)\n--\n\n"
     "Write where the lists of these rows begin, and then their lengths, to found. chunks has the\n"
     "first row of each chunk; then what is added to a row for the place of its offset, which is\n"
     "the offset's address less offsets, in units of width bytes; then what is added to offsets.\n"
     "All but offsets are int64. Return the length if all have one, else -1."},
    {"copy_sequences", copy_sequences, METH_VARARGS,
     "copy_sequences(target, rows, row_bytes, samples, starts, counts, item)\n--\n\n"
     "Copy the first counts[i] rows of samples[i] to row starts[i] of target, which has so many\n"
     "rows, and repeat the bytes of item between them, unless it is empty. Samples are lists of\n"
     "ints, or buffers; starts and counts are int64. Return whether all samples are such."},
    {"receive_one", (PyCFunction)(void (*)(void))receive_one, METH_FASTCALL,
     "receive_one(channel, looks)\n--\n\n"
     "Receive a message from a socket: None if it has none after so many looks, b\"\" if the other\n"
     "end is closed. Other processes may run between two looks. OSError says what went wrong."},
    {"receive_each", receive_each, METH_VARARGS,
     "receive_each(descriptors, looks)\n--\n\n"
     "Receive a message from each socket that has one, as receive_one does. Descriptors are ints of C.\n"
     "Return a list of pairs of descriptor and message, which is empty if a socket was closed by the\n"
     "other side."},
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
