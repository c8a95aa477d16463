# C declarations of tail_index.py for the other compiled modules.


cdef class TailIndex:
    cdef bytearray _data
    cdef Py_ssize_t _head
    cdef Py_ssize_t _count

    cpdef object append(
        self,
        long long offset,
        long long position,
        unsigned int length,
        unsigned int slot,
        long long address,
        long long time_us,
    )
    cdef Py_ssize_t _grow(self) except? -1
    cdef Py_ssize_t _last_at(self, Py_ssize_t field, long long key) except? -1
    cdef object _check_range(self, Py_ssize_t start, Py_ssize_t stop)
