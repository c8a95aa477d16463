# CRC-32 by carry-less multiplication, on processors that support it. It is the only function of this package that is written in C, because
# Cython cannot express the instruction (decision 0108). checksum.py checks for support and otherwise uses tables.
#
# Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), for reflected bits: 128 bits of
# remainder are multiplied over the next 16 bytes, then reduced to 64 bits and to 32 (Barrett). The constants are that paper's for 0xEDB88320:
# x^(128+32), x^(128-32) and x^64 modulo the polynomial, the polynomial, and x^64 divided by it.

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__GNUC__)
    #include <immintrin.h>

    static int crc32_folds(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

    __attribute__((target("pclmul,sse4.1")))
    static unsigned int crc32_fold(const unsigned char *p, Py_ssize_t blocks)
    {
        const __m128i over = _mm_set_epi64x(0x0ccaa009eLL, 0x1751997d0LL);
        const __m128i down = _mm_set_epi64x(0, 0x163cd6124LL);
        const __m128i barrett = _mm_set_epi64x(0x1f7011641LL, 0x1db710641LL);
        const __m128i low = _mm_setr_epi32(-1, 0, -1, 0);
        __m128i x = _mm_xor_si128(_mm_loadu_si128((const __m128i *)p), _mm_cvtsi32_si128(-1)), y;
        while (--blocks > 0) {
            p += 16;
            y = _mm_xor_si128(_mm_clmulepi64_si128(x, over, 0x00), _mm_clmulepi64_si128(x, over, 0x11));
            x = _mm_xor_si128(y, _mm_loadu_si128((const __m128i *)p));
        }
        x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, over, 0x10));
        x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(_mm_and_si128(x, low), down, 0x00));
        y = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(x, low), barrett, 0x10), low);
        x = _mm_xor_si128(x, _mm_clmulepi64_si128(y, barrett, 0x00));
        return (unsigned int)_mm_extract_epi32(x, 1);
    }
    #else
    static int crc32_folds(void) { return 0; }
    static unsigned int crc32_fold(const unsigned char *p, Py_ssize_t blocks) { return 0; }
    #endif
    """
    bint crc32_folds() noexcept nogil
    unsigned int crc32_fold(const unsigned char *p, Py_ssize_t blocks) noexcept nogil
