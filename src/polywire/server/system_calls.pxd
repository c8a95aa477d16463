# The system calls that the readiness driver makes for every request; declarations only. On systems without epoll, the driver is not used; the
# definitions for them only let the module compile.

cdef extern from *:
    """
    #include <sys/types.h>
    #include <sys/socket.h>
    #ifdef __linux__
    #include <sys/epoll.h>
    #else
    struct epoll_event { unsigned int events; union { int fd; } data; };
    static int epoll_wait(int epoll, struct epoll_event *found, int found_max, int wait_ms) { return 0; }
    #endif
    """
    ctypedef union epoll_data:
        int fd

    struct epoll_event:
        unsigned int events
        epoll_data data

    int epoll_wait(int epoll, epoll_event *found, int found_max, int wait_ms) noexcept nogil
    Py_ssize_t recv(int fd, void *to, size_t size, int flags) noexcept nogil
    Py_ssize_t send(int fd, const void *data, size_t size, int flags) noexcept nogil
