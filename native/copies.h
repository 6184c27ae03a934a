/* A copy that bypasses the caches. */
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { LINE = 64 };

/* `out` and `source` do not overlap. */
static void stream_copy(char *out, const char *source, size_t count)
{
#if defined(__x86_64__)
    size_t head = (size_t)(-(uintptr_t)out % LINE), body;
    head = head < count ? head : count;
    body = (count - head) / LINE;
    memcpy(out, source, head);
    out += head;
    source += head;
    for (size_t i = 0; i < body; i++, out += LINE, source += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32)), d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)out, a);
        _mm_stream_si128((__m128i *)(out + 16), b);
        _mm_stream_si128((__m128i *)(out + 32), c);
        _mm_stream_si128((__m128i *)(out + 48), d);
    }
    _mm_sfence(); /* other threads see these stores before later ones */
    memcpy(out, source, count - head - body * LINE);
#else
    memcpy(out, source, count); /* other processors: an ordinary copy */
#endif
}
