# C-level face of header.py for the other compiled modules; it holds declarations only.

cdef Py_ssize_t fill_layout(const unsigned char *p, Py_ssize_t at, Py_ssize_t limit, long long *places) noexcept nogil
cdef void seal_header(unsigned char *p, Py_ssize_t at) noexcept nogil
cdef bint body_matches(const unsigned char *p, Py_ssize_t at) noexcept nogil
cdef bint header_matches(const unsigned char *p, Py_ssize_t at, Py_ssize_t limit) noexcept nogil
cdef bint is_sound(const unsigned char *p, Py_ssize_t at, Py_ssize_t limit) noexcept nogil
