# C declarations of build.py for the other compiled modules.

cdef bytearray allocate(long long *places, Py_ssize_t count)
cdef void finish(unsigned char *p, const long long *places, Py_ssize_t count) noexcept nogil
