/* Scales of runs (formats/optim/scales.py): the expected size of a step's numbers, from second moments and a byte for
 * each run of 256. All of it is integer arithmetic on patterns. */
#define RUN 256
#define LEAST 126 /* what the byte 0 stands for, in quarters of an octave */
#define FIRST 246 /* class 0 */
#define LAST (FIRST + 15)
#define OCTAVE (1 << 23)
#define MAGNITUDE 0x7FFFFFFFu
#define LOW 0xFFFFFFu

INLINE uint32_t NAME(least_expected)(u8 scale)
{
    return (uint32_t)(scale + LEAST) << 21;
}

static void NAME(mean_scales)(const u32 *values, const u32 *second, int32_t centre, u8 *out, size_t count)
{
    const int32_t low = centre - 127 * OCTAVE, high = centre + 6 * OCTAVE;
    for (size_t start = 0, run = 0; start < count; start += RUN, run++) {
        size_t size = count - start < RUN ? count - start : RUN;
        const u32 *value = values + start, *moment = second + start;
        uint32_t sum = 0; /* at most 2^22 for each of 256 */
        for (size_t i = 0; i < size; i++) {
            uint32_t magnitude = value[i] & MAGNITUDE;
            magnitude = magnitude > 0x7F800000u ? 0x7F800000u : magnitude;
            int32_t ratio = (int32_t)magnitude - (int32_t)((moment[i] & MAGNITUDE) >> 1);
            ratio = ratio < low ? low : ratio;
            ratio = ratio > high ? high : ratio;
            union {
                uint32_t pattern;
                float number;
            } share = {(uint32_t)ratio - (uint32_t)low};
            sum += (uint32_t)(int32_t)(share.number * 65536.0f);
        }
        uint64_t mean = size < RUN ? (uint64_t)sum * RUN / size : sum;
        union {
            float number;
            uint32_t pattern;
        } logarithm = {(float)mean};
        int64_t quarters = (((int64_t)logarithm.pattern - (int64_t)(127 + 24) * OCTAVE + centre + (1 << 20)) >> 21) - LEAST;
        out[run] = (u8)(quarters < 0 ? 0 : quarters > 255 ? 255 : quarters);
    }
}

#define AWAY(BITS, WORD)                                                                                               \
    static void GLUE(NAME(away), BITS)(const void *values_, const u32 *second, const u8 *scales, void *out_,           \
                                       size_t count)                                                                   \
    {                                                                                                                  \
        const WORD *values = values_;                                                                                  \
        WORD *out = out_;                                                                                              \
        for (size_t start = 0; start < count; start += RUN) {                                                          \
            size_t end = count - start < RUN ? count : start + RUN;                                                    \
            uint32_t least = NAME(least_expected)(scales[start / RUN]);                                                \
            EACH for (size_t i = start; i < end; i++)                                                                  \
            {                                                                                                          \
                WORD expected = (WORD)((((second[i] & MAGNITUDE) >> 1) + least) >> (32 - BITS));                       \
                WORD magnitude = (WORD)(values[i] & (MAGNITUDE >> (32 - BITS)));                                       \
                WORD from = (WORD)(magnitude == expected ? 0 : magnitude);                                             \
                WORD difference = (WORD)(magnitude ? (WORD)(from - expected) : 0);                                     \
                out[i] = (WORD)((WORD)(difference << 1) | (WORD)(values[i] >> (BITS - 1)));                            \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static void GLUE(NAME(back), BITS)(const void *words_, const u32 *second, const u8 *scales, void *out_,            \
                                       size_t count)                                                                   \
    {                                                                                                                  \
        const WORD *words = words_;                                                                                    \
        WORD *out = out_;                                                                                              \
        for (size_t start = 0; start < count; start += RUN) {                                                          \
            size_t end = count - start < RUN ? count : start + RUN;                                                    \
            uint32_t least = NAME(least_expected)(scales[start / RUN]);                                                \
            EACH for (size_t i = start; i < end; i++)                                                                  \
            {                                                                                                          \
                WORD expected = (WORD)((((second[i] & MAGNITUDE) >> 1) + least) >> (32 - BITS));                       \
                WORD difference = (WORD)(words[i] >> 1);                                                               \
                WORD magnitude = (WORD)((WORD)(difference + expected) & (MAGNITUDE >> (32 - BITS)));                   \
                magnitude = (WORD)(magnitude ? magnitude : expected);                                                  \
                magnitude = (WORD)(difference ? magnitude : 0);                                                        \
                out[i] = (WORD)(magnitude | (WORD)(words[i] << (BITS - 1)));                                           \
            }                                                                                                          \
        }                                                                                                              \
    }

AWAY(16, u16)
AWAY(32, u32)
#undef AWAY

static void NAME(classes)(const u32 *base, const u32 *second, const u8 *scales, u8 *labels, size_t count)
{
    for (size_t start = 0; start < count; start += RUN) {
        size_t end = count - start < RUN ? count : start + RUN;
        uint32_t least = NAME(least_expected)(scales[start / RUN]) + (1u << 31);
        EACH for (size_t i = start; i < end; i++)
        {
            uint32_t octave = (((second[i] & MAGNITUDE) >> 1) + least - (base[i] & MAGNITUDE)) >> 23;
            octave = octave < FIRST ? FIRST : octave;
            octave = octave > LAST ? LAST : octave;
            labels[i] = (u8)(octave - FIRST);
        }
    }
}

static void NAME(changes)(const u32 *new, const u32 *base, u32 *out, size_t count)
{
    EACH for (size_t i = 0; i < count; i++) {
        uint32_t difference = new[i] - base[i], negative = 0u - (difference >> 30 & 1);
        uint32_t low = difference ^ negative, flipped = (new[i] ^ base[i]) >> 31;
        out[i] = (low & LOW) | (negative & 1) << 24 | flipped << 25 | (low & 0x3F000000u) << 2;
    }
}

INLINE uint32_t NAME(changed)(uint32_t word, uint32_t base)
{
    uint32_t difference = ((word & LOW) | word >> 26 << 24) ^ (0u - (word >> 24 & 1));
    return ((word << 6 ^ base) & ~MAGNITUDE) | ((difference + base) & MAGNITUDE);
}

#define PLACED(at)                                                                                                     \
    {                                                                                                                  \
        size_t from = (at), place = places[quarter_of][labels[from]]++;                                                \
        if (place >= count)                                                                                            \
            return 0;                                                                                                  \
        out[from] = NAME(changed)(words[place], base[from]);                                                           \
    }

/* Each place depends on the one before. So four quarters are read at once. Returns 0 for places outside. */
static int NAME(unsorted_changes)(const u32 *words, const u8 *labels, uint64_t (*places)[256], const u32 *base,
                                  u32 *out, size_t count)
{
    size_t quarter = count / 4;
    for (size_t i = 0; i < quarter; i++)
        for (size_t quarter_of = 0; quarter_of < 4; quarter_of++)
            PLACED(i + quarter_of * quarter)
    for (size_t i = 4 * quarter; i < count; i++) {
        const size_t quarter_of = 3;
        PLACED(i)
    }
    return 1;
}

#undef PLACED

static void NAME(scaled)(const f32 *values, float factor, f32 *out, size_t count)
{
    EACH for (size_t i = 0; i < count; i++) {
        float product = values[i] * factor;
        out[i] = product == product ? product : __builtin_nanf("");
    }
}

#undef RUN
#undef LEAST
#undef FIRST
#undef LAST
#undef OCTAVE
#undef MAGNITUDE
#undef LOW
