# C declarations of memory.py for the other compiled modules: its class, and the loads and stores that must be inlined.
# Compiled code assumes a little-endian machine; it assumes nothing about alignment.

from libc.string cimport memcpy, memset


cdef class Lent:
    cdef Py_buffer view
    cdef unsigned char *p
    cdef Py_ssize_t size


cdef bytearray filled(const unsigned char *p, Py_ssize_t size)
cdef Lent lend(object data)
cdef Lent lend_writable(object data)


cdef inline unsigned int load_u32(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    cdef unsigned int x
    memcpy(&x, p + at, 4)
    return x


cdef inline int load_i32(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    cdef int x
    memcpy(&x, p + at, 4)
    return x


cdef inline unsigned long long load_u64(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    cdef unsigned long long x
    memcpy(&x, p + at, 8)
    return x


cdef inline long long load_i64(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    cdef long long x
    memcpy(&x, p + at, 8)
    return x


cdef inline void store_u32(unsigned char *p, Py_ssize_t at, unsigned int x) noexcept nogil:
    memcpy(p + at, &x, 4)


cdef inline void store_u64(unsigned char *p, Py_ssize_t at, unsigned long long x) noexcept nogil:
    memcpy(p + at, &x, 8)


cdef inline void store_i64(unsigned char *p, Py_ssize_t at, long long x) noexcept nogil:
    memcpy(p + at, &x, 8)


cdef inline void move(
    unsigned char *target, Py_ssize_t target_at, const unsigned char *source, Py_ssize_t source_at, Py_ssize_t size
) noexcept nogil:
    memcpy(target + target_at, source + source_at, size)


cdef inline void clear(unsigned char *p, Py_ssize_t at, Py_ssize_t size) noexcept nogil:
    memset(p + at, 0, size)
