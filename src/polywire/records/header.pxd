# C declarations of header.py for the other compiled modules.

cdef Py_ssize_t fill_layout(const unsigned char *p, Py_ssize_t at, Py_ssize_t limit, long long *places) noexcept nogil
cdef void seal_header(unsigned char *p, Py_ssize_t at) noexcept nogil
cdef void number_header(
    unsigned char *p, Py_ssize_t at, unsigned long long partition, unsigned int epoch, unsigned long long base_offset,
    unsigned long long base_address, long long append_time_us
) noexcept nogil
cdef bint body_matches(const unsigned char *p, Py_ssize_t at) noexcept nogil
cdef bint header_matches(const unsigned char *p, Py_ssize_t at, Py_ssize_t limit) noexcept nogil
cdef bint is_sound(const unsigned char *p, Py_ssize_t at, Py_ssize_t limit) noexcept nogil
