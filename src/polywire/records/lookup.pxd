# C declarations of lookup.py for the other compiled modules.

cdef Py_ssize_t first_row(
    const unsigned char *p, const long long *places, long long base, Py_ssize_t count, long long wanted
) noexcept nogil
