# C declarations of reshape.py for the other compiled modules.

cdef Py_ssize_t small_records(const unsigned char *p, Py_ssize_t at, Py_ssize_t size) noexcept nogil
