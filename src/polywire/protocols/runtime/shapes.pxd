# C-level face of shapes.py for the other compiled modules; it holds declarations only.


cdef bint is_open(object access, object principal, object topic) except -1
cdef bint is_permitted(object access, object principal, object action, object topic) except -1


cdef class BareShape:
    cdef public bytes before
    cdef public object level
    cdef public object partition


cdef class Shapes:
    cdef object _latest
    cdef BareShape find(
        self, const unsigned char *p, Py_ssize_t at, Py_ssize_t end, Py_ssize_t any_at, Py_ssize_t any_end
    )


cdef class Template:
    cdef public bytes frame
    cdef bytearray _varies

    cdef bint matches(self, const unsigned char *p, Py_ssize_t at, Py_ssize_t end)
