/* Loops over words of BITS bits (8, 16, 32, 64), included once for each and for each instruction set. */
#define WORD GLUE(u, BITS)
#define NAME(name) PASTE(name, BITS, ISA)

INLINE WORD NAME(unzigzagged)(WORD value)
{
    return (WORD)((WORD)(value >> 1) ^ (WORD)(0 - (value & 1)));
}

static void NAME(difference)(const void *new_, const void *base_, void *out_, size_t count)
{
    const WORD *new = new_, *base = base_;
    WORD *out = out_;
    EACH for (size_t i = 0; i < count; i++) {
        WORD delta = (WORD)(new[i] - base[i]);
        out[i] = (WORD)((WORD)(delta << 1) ^ (WORD)(0 - (delta >> (BITS - 1))));
    }
}

static void NAME(zigzag)(const void *values_, void *out_, size_t count)
{
    const WORD *values = values_;
    WORD *out = out_;
    EACH for (size_t i = 0; i < count; i++)
        out[i] = (WORD)((WORD)(values[i] << 1) ^ (WORD)(0 - (values[i] >> (BITS - 1))));
}

static void NAME(rotate_left)(const void *values_, void *out_, size_t count)
{
    const WORD *values = values_;
    WORD *out = out_;
    EACH for (size_t i = 0; i < count; i++)
        out[i] = (WORD)((WORD)(values[i] << 1) | (WORD)(values[i] >> (BITS - 1)));
}

/* ------------------------------------------------------------------------------------------- words <-> planes */

#define SPLIT(TYPE)                                                                                                    \
    {                                                                                                                  \
        TYPE *restrict plane = (TYPE *)planes[one].at + start;                                                         \
        for (size_t i = 0; i < size; i++)                                                                              \
            plane[i] = (TYPE)(tile[i] >> shift);                                                                       \
        break;                                                                                                         \
    }

/* A tile stays in the first-level cache while its planes are written one after another. */
static void NAME(split)(const void *words_, const struct plane *planes, size_t number, size_t count)
{
    const WORD *words = words_;
    for (size_t start = 0; start < count; start += TILE) {
        const WORD *restrict tile = words + start;
        size_t size = count - start < TILE ? count - start : TILE;
        int shift = 0;
        for (size_t one = 0; one < number; one++) {
            switch (planes[one].size) {
            case 1:
                SPLIT(u8)
#if BITS >= 16
            case 2:
                SPLIT(u16)
#endif
#if BITS >= 32
            case 4:
                SPLIT(u32)
#endif
#if BITS >= 64
            case 8:
                SPLIT(u64)
#endif
            }
            shift += 8 * (int)planes[one].size;
        }
    }
}

#define MERGE(TYPE)                                                                                                    \
    {                                                                                                                  \
        const TYPE *restrict plane = (const TYPE *)planes[one].at + start;                                             \
        if (one)                                                                                                       \
            for (size_t i = 0; i < size; i++)                                                                          \
                tile[i] = (WORD)(tile[i] | (WORD)((WORD)plane[i] << shift));                                           \
        else                                                                                                           \
            for (size_t i = 0; i < size; i++)                                                                          \
                tile[i] = plane[i];                                                                                    \
        break;                                                                                                         \
    }

INLINE void NAME(finish)(const WORD *merged, int how, const WORD *base, WORD *out, size_t count)
{
    switch (how) {
    case PUT:
        EACH for (size_t i = 0; i < count; i++) out[i] = merged[i];
        break;
    case UNZIGZAG:
        EACH for (size_t i = 0; i < count; i++) out[i] = NAME(unzigzagged)(merged[i]);
        break;
    case ROTATE:
        EACH for (size_t i = 0; i < count; i++)
            out[i] = (WORD)((WORD)(merged[i] >> 1) | (WORD)(merged[i] << (BITS - 1)));
        break;
    case ADD:
        EACH for (size_t i = 0; i < count; i++) out[i] = (WORD)(base[i] + NAME(unzigzagged)(merged[i]));
        break;
    case XOR:
        EACH for (size_t i = 0; i < count; i++) out[i] = (WORD)(base[i] ^ merged[i]);
        break;
    }
}

static void NAME(combine)(const struct plane *planes, size_t number, int how, const void *base_, void *out_,
                          size_t count)
{
    const WORD *base = base_;
    WORD *out = out_;
    if (number == 1 && planes[0].size == sizeof(WORD)) {
        NAME(finish)(planes[0].at, how, base, out, count);
        return;
    }
    for (size_t start = 0; start < count; start += TILE) {
        WORD tile[TILE];
        size_t size = count - start < TILE ? count - start : TILE;
        int shift = 0;
        for (size_t one = 0; one < number; one++) {
            switch (planes[one].size) {
            case 1:
                MERGE(u8)
#if BITS >= 16
            case 2:
                MERGE(u16)
#endif
#if BITS >= 32
            case 4:
                MERGE(u32)
#endif
#if BITS >= 64
            case 8:
                MERGE(u64)
#endif
            }
            shift += 8 * (int)planes[one].size;
        }
        NAME(finish)(tile, how, base ? base + start : base, out + start, size);
    }
}

#undef SPLIT
#undef MERGE

/* -------------------------------------------------------------------------------------------------- exceptions */

/* A bit for each of 64 values of at least `least`. */
INLINE uint64_t NAME(at_least)(const WORD *values, WORD least)
{
#if MASKS && BITS == 8
    return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(values), _mm512_set1_epi8((char)least));
#elif MASKS && BITS == 16
    __m512i limit = _mm512_set1_epi16((short)least);
    uint64_t high = _mm512_cmpge_epu16_mask(_mm512_loadu_si512(values + 32), limit);
    return high << 32 | _mm512_cmpge_epu16_mask(_mm512_loadu_si512(values), limit);
#elif MASKS && BITS == 32
    __m512i limit = _mm512_set1_epi32((int)least);
    uint64_t mask = 0;
    for (int k = 0; k < 4; k++)
        mask |= (uint64_t)_mm512_cmpge_epu32_mask(_mm512_loadu_si512(values + 16 * k), limit) << 16 * k;
    return mask;
#else
    u8 hits[64];
    uint64_t mask = 0;
    for (size_t k = 0; k < 64; k++)
        hits[k] = values[k] >= least ? 255 : 0;
#if defined(__x86_64__)
    for (int k = 0; k < 4; k++)
        mask |= (uint64_t)(unsigned)_mm_movemask_epi8(_mm_loadu_si128((const __m128i *)(hits + 16 * k))) << 16 * k;
#else
    for (size_t k = 0; k < 8; k++) { /* the lowest bits of eight bytes */
        uint64_t eight;
        memcpy(&eight, hits + 8 * k, 8);
        mask |= ((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56) << 8 * k;
    }
#endif
    return mask;
#endif
}

/* Writes the positions of values of at least `limit`, and returns their number. */
static size_t NAME(find)(const void *values_, uint64_t limit, u32 *where, size_t count)
{
    const WORD *values = values_;
    WORD least = (WORD)limit;
    size_t found = 0, i = 0;
    for (; i + 64 <= count; i += 64)
        for (uint64_t mask = NAME(at_least)(values + i, least); mask; mask &= mask - 1)
            where[found++] = (uint32_t)(i + (size_t)__builtin_ctzll(mask));
    for (; i < count; i++)
        if (values[i] >= least)
            where[found++] = (uint32_t)i;
    return found;
}

/* Separates the values of at least `limit`: the steps to them, each less `limit`, and the others in `rest`. Returns 0 if
 * steps and values have more than `most` bytes. */
static int NAME(exceptions)(const void *values_, uint64_t limit, u8 *rest, u8 *steps, size_t *step_count,
                            void *greater_, size_t *found_, size_t most, size_t count)
{
    const WORD *values = values_;
    WORD *greater = greater_, least = (WORD)limit;
    size_t number = 0, found = 0, after = 0;
    for (size_t i = 0; i < count; i += 64) {
        size_t size = count - i < 64 ? count - i : 64;
        uint64_t mask = 0;
        if (size == 64) {
            mask = NAME(at_least)(values + i, least);
            if (rest)
                for (size_t k = 0; k < 64; k++)
                    rest[i + k] = (u8)(values[i + k] < least ? values[i + k] : 0);
        } else
            for (size_t k = 0; k < size; k++) {
                int hit = values[i + k] >= least;
                mask |= (uint64_t)hit << k;
                if (rest)
                    rest[i + k] = (u8)(hit ? 0 : values[i + k]);
            }
        for (; mask; mask &= mask - 1) {
            size_t at = i + (size_t)__builtin_ctzll(mask), gap = at - after;
            if (number + gap / 255 + 1 + (found + 1) * sizeof(WORD) > most)
                return 0;
            for (; gap >= 255; gap -= 255)
                steps[number++] = 255;
            steps[number++] = (u8)gap;
            greater[found++] = (WORD)(values[at] - least);
            after = at + 1;
        }
    }
    *step_count = number;
    *found_ = found;
    return 1;
}

/* Returns the number of steps; -1: `where` is not ascending below `count`, or there are more than `most` steps. */
static int64_t NAME(take)(const void *values_, uint64_t limit, const u32 *where, size_t found, u8 *rest, u8 *steps,
                          size_t most, void *greater_, size_t count)
{
    const WORD *values = values_;
    WORD *greater = greater_, least = (WORD)limit;
    size_t number = 0, after = 0;
    if (rest)
        EACH for (size_t i = 0; i < count; i++) rest[i] = (u8)(values[i] < least ? values[i] : 0);
    for (size_t k = 0; k < found; k++) {
        size_t at = where[k], gap = at - after;
        if (at < after || at >= count)
            return -1;
        for (; gap >= 255; gap -= 255) {
            if (number >= most)
                return -1;
            steps[number++] = 255;
        }
        if (number >= most)
            return -1;
        steps[number++] = (u8)gap;
        greater[k] = (WORD)(values[at] - least);
        after = at + 1;
    }
    return (int64_t)number;
}

/* Returns whether the steps lead to exactly `found` positions below `count`. */
static int NAME(put)(const u8 *steps, size_t number, const void *greater_, size_t found, uint64_t limit, void *out_,
                     size_t count)
{
    const WORD *greater = greater_;
    WORD *out = out_, least = (WORD)limit;
    size_t at = 0, used = 0;
    for (size_t k = 0; k < number; k++) {
        at += steps[k];
        if (steps[k] < 255) {
            if (at >= count || used >= found)
                return 0;
            out[at++] = (WORD)(greater[used++] + least);
        }
    }
    return used == found;
}

/* Puts exceptions, each less `limit`, at their places in a tile that begins with word `start`. */
static void NAME(place)(const u32 *where, const void *greater_, uint64_t limit, size_t start, void *out_, size_t count)
{
    const WORD *greater = greater_;
    WORD *out = out_, least = (WORD)limit;
    for (size_t k = 0; k < count; k++)
        out[where[k] - start] = (WORD)(greater[k] + least);
}

/* ---------------------------------------------------------------------------------------------------- contexts */

static void NAME(classify)(const void *base_, int shift, uint64_t low, uint64_t high, u8 *labels, size_t count)
{
    const WORD *base = base_;
    WORD least = (WORD)low, most = (WORD)high, mask = (WORD)((WORD)~(WORD)0 >> 1);
    EACH for (size_t i = 0; i < count; i++) {
        WORD class = (WORD)((WORD)(base[i] & mask) >> shift);
        class = class < least ? least : class;
        class = class > most ? most : class;
        labels[i] = (u8)(class - least);
    }
}

#define PLACE(place, quarter, at)                                                                                      \
    size_t place = places[quarter][labels[at]]++;                                                                      \
    if (place >= count)                                                                                                \
        return 0;

/* Each position depends on the previous one, so four quarters are sorted at a time. Returns 0 if one is outside. */
static int NAME(sort)(const void *words_, const u8 *labels, uint64_t (*places)[256], void *out_, size_t count)
{
    const WORD *words = words_;
    WORD *out = out_;
    size_t quarter = count / 4;
    for (size_t i = 0; i < quarter; i++) {
        PLACE(p, 0, i)
        PLACE(q, 1, i + quarter)
        PLACE(r, 2, i + 2 * quarter)
        PLACE(s, 3, i + 3 * quarter)
        out[p] = words[i];
        out[q] = words[i + quarter];
        out[r] = words[i + 2 * quarter];
        out[s] = words[i + 3 * quarter];
    }
    for (size_t i = 4 * quarter; i < count; i++) {
        PLACE(s, 3, i)
        out[s] = words[i];
    }
    return 1;
}

static int NAME(add_unsorted)(const void *words_, const u8 *labels, uint64_t (*places)[256], const void *base_,
                              void *out_, size_t count)
{
    const WORD *words = words_, *base = base_;
    WORD *out = out_;
    size_t quarter = count / 4;
    for (size_t i = 0; i < quarter; i++) {
        PLACE(p, 0, i)
        PLACE(q, 1, i + quarter)
        PLACE(r, 2, i + 2 * quarter)
        PLACE(s, 3, i + 3 * quarter)
        out[i] = (WORD)(base[i] + NAME(unzigzagged)(words[p]));
        out[i + quarter] = (WORD)(base[i + quarter] + NAME(unzigzagged)(words[q]));
        out[i + 2 * quarter] = (WORD)(base[i + 2 * quarter] + NAME(unzigzagged)(words[r]));
        out[i + 3 * quarter] = (WORD)(base[i + 3 * quarter] + NAME(unzigzagged)(words[s]));
    }
    for (size_t i = 4 * quarter; i < count; i++) {
        PLACE(s, 3, i)
        out[i] = (WORD)(base[i] + NAME(unzigzagged)(words[s]));
    }
    return 1;
}

#undef PLACE
#undef NAME
#undef WORD
