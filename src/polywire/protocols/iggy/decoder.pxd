# C-level face of decoder.py for the other compiled modules; it holds declarations only.

cdef unsigned long long batch_checksum(
    const unsigned char *p, Py_ssize_t at, Py_ssize_t stop, Py_ssize_t count, unsigned char *scratch
) noexcept nogil
