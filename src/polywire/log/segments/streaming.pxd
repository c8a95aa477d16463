# A copy to memory that this processor does not read soon. It writes around the CPU cache, so the old content of the target is never
# loaded, and what other threads have in the cache stays there: 0.12 s of processor time per GB instead of 0.20 with memcpy (decision 0104).
# Cython cannot express the instructions (decision 0108). Other processors than x86-64 use memcpy.

cdef extern from *:
    """
    #include <string.h>
    #if defined(__x86_64__) && defined(__GNUC__)
    #include <emmintrin.h>
    #include <stdint.h>

    static void copy_past_cache(unsigned char *target, const unsigned char *source, Py_ssize_t size)
    {
        Py_ssize_t head = -(uintptr_t)target & 63;  // such writes are fast only for whole cache lines
        if (head > size)
            head = size;
        memcpy(target, source, head);
        for (target += head, source += head, size -= head; size >= 64; target += 64, source += 64, size -= 64) {
            _mm_prefetch((const char *)source + 1024, _MM_HINT_NTA);  // beyond the end it does nothing
            __m128i a = _mm_loadu_si128((const __m128i *)source);
            __m128i b = _mm_loadu_si128((const __m128i *)source + 1);
            __m128i c = _mm_loadu_si128((const __m128i *)source + 2);
            __m128i d = _mm_loadu_si128((const __m128i *)source + 3);
            _mm_stream_si128((__m128i *)target, a);
            _mm_stream_si128((__m128i *)target + 1, b);
            _mm_stream_si128((__m128i *)target + 2, c);
            _mm_stream_si128((__m128i *)target + 3, d);
        }
        memcpy(target, source, size);
        _mm_sfence();  // other threads must see these bytes before anything that is written later
    }
    #else
    #define copy_past_cache(target, source, size) memcpy(target, source, size)
    #endif
    """
    void copy_past_cache(unsigned char *target, const unsigned char *source, Py_ssize_t size) noexcept nogil
