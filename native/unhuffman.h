/* Decodes frames that huffman.h writes. Everything else is refused, also if zstd would read it: the caller then asks
 * zstd. What is accepted, zstd accepts, too, and decodes to the same bytes. */

/* Bits from the end of a stream to its begin, with checks. */
struct NAME(backwards) {
    const u8 *begin, *end;
    int64_t left; /* bits; below 0: more were read than there are */
};

/* The next `number` bits, at most 11, without taking them; beyond the begin they are 0. */
static inline uint32_t NAME(peek)(const struct NAME(backwards) *bits, int number)
{
    int64_t low = bits->left - number;
    int64_t byte = low > 0 ? low >> 3 : 0;
    const u8 *from = bits->begin + byte;
    uint32_t held = 0;
    if (bits->left <= 0)
        return 0;
    for (int i = 0; i < 3 && from + i < bits->end; i++)
        held |= (uint32_t)from[i] << 8 * i;
    held = low >= 0 ? held >> (low - 8 * byte) : held << -low;
    return held & ((1u << number) - 1);
}

/* Starts at the highest bit that is set, which is none of the stream's. */
static int NAME(start)(struct NAME(backwards) *bits, const u8 *begin, size_t size)
{
    if (!size || !begin[size - 1])
        return 0;
    bits->begin = begin;
    bits->end = begin + size;
    bits->left = 8 * (int64_t)size - 8 + 31 - __builtin_clz(begin[size - 1]);
    return 1;
}

/* Decodes the weights of an FSE stream. Returns their number; 0: it is not one that huffman.h writes. */
static size_t NAME(read_weights)(const u8 *in, size_t size, u8 *weights)
{
    enum { SIZE = 1 << WEIGHTS_LOG };
    uint32_t shares[MOST_BITS + 1] = {0}, remaining = SIZE + 1, threshold = SIZE, k = 0;
    int width = WEIGHTS_LOG + 1;
    size_t bit = 4;
    u8 padded[132] = {0};
    if (size < 2 || size > 127 || (in[0] & 15) != WEIGHTS_LOG - 5)
        return 0;
    memcpy(padded, in, size);
#define BITS_AT(at) ((uint32_t)(padded[(at) / 8] | padded[(at) / 8 + 1] << 8) >> (at) % 8)
    while (remaining > 1 && k <= MOST_BITS && bit < 8 * size) {
        uint32_t spare = 2 * threshold - 1 - remaining, value = BITS_AT(bit);
        if ((value & (threshold - 1)) < spare) {
            value &= threshold - 1;
            bit += (size_t)width - 1;
        } else {
            value &= 2 * threshold - 1;
            value -= value >= threshold ? spare : 0;
            bit += (size_t)width;
        }
        if (value < 1 || value > remaining)
            return 0; /* 0: a share below 1 of 64, which huffman.h does not give */
        shares[k++] = value - 1;
        remaining -= value - 1;
        for (; remaining < threshold && threshold > 1; threshold >>= 1)
            width--;
        for (uint32_t zeros = 3; value == 1 && zeros == 3 && bit < 8 * size; bit += 2) {
            zeros = BITS_AT(bit) & 3;
            k += zeros;
        }
    }
#undef BITS_AT
    size_t table = (bit + 7) / 8;
    if (remaining != 1 || table >= size)
        return 0;
    u8 spread[SIZE], widths[SIZE], bases[SIZE];
    uint32_t next[MOST_BITS + 1], at = 0;
    for (uint32_t s = 0; s <= MOST_BITS; s++) {
        next[s] = shares[s];
        for (uint32_t i = 0; i < shares[s]; i++, at = (at + SIZE / 2 + SIZE / 8 + 3) % SIZE)
            spread[at] = (u8)s;
    }
    for (uint32_t i = 0; i < SIZE; i++) {
        uint32_t state = next[spread[i]]++;
        widths[i] = (u8)(WEIGHTS_LOG - (31 - __builtin_clz(state)));
        bases[i] = (u8)((state << widths[i]) - SIZE);
    }
    struct NAME(backwards) bits;
    uint32_t states[2];
    size_t count = 0;
    if (!NAME(start)(&bits, in + table, size - table) || bits.left < 2 * WEIGHTS_LOG)
        return 0;
    for (int i = 0; i < 2; i++, bits.left -= WEIGHTS_LOG)
        states[i] = NAME(peek)(&bits, WEIGHTS_LOG);
    for (; count < 254; count++) {
        uint32_t *state = &states[count & 1];
        int number = widths[*state];
        weights[count] = spread[*state];
        *state = bases[*state] + (number ? NAME(peek)(&bits, number) : 0);
        bits.left -= number;
        if (bits.left < 0) {
            weights[count + 1] = spread[states[~count & 1]];
            return count + 2;
        }
    }
    return 0;
}

/* Makes the table of a block: for each 11 bits the value and the length of its code. Returns the description's bytes. */
static size_t NAME(read_table)(const u8 *in, size_t size, uint16_t *table)
{
    u8 weights[256];
    size_t count, used;
    uint32_t total = 0, starts[MOST_BITS + 2], of[MOST_BITS + 2] = {0}, at = 0;
    if (!size)
        return 0;
    if (in[0] < 128) {
        used = 1 + (size_t)in[0];
        count = used <= size ? NAME(read_weights)(in + 1, in[0], weights) : 0;
    } else {
        count = (size_t)in[0] - 127;
        used = 1 + (count + 1) / 2;
        for (size_t i = 0; i < count && used <= size; i++)
            weights[i] = i % 2 ? in[1 + i / 2] & 15 : in[1 + i / 2] >> 4;
    }
    if (!count || used > size)
        return 0;
    for (size_t i = 0; i < count; i++) {
        if (weights[i] > MOST_BITS)
            return 0;
        of[weights[i]]++;
        total += 1u << weights[i] >> 1;
    }
    if (!total || total >= 1 << MOST_BITS)
        return 0;
    int longest = 32 - __builtin_clz(total);
    uint32_t rest = (1u << longest) - total;
    if (rest & (rest - 1))
        return 0;
    weights[count] = (u8)(32 - __builtin_clz(rest));
    of[weights[count++]]++;
    if (of[1] < 2 || of[1] & 1)
        return 0;
    for (int weight = 1; weight <= longest; weight++) {
        starts[weight] = at;
        at += of[weight] << (weight - 1) << (MOST_BITS - longest);
    }
    for (size_t i = 0; i < count; i++)
        if (weights[i]) {
            uint32_t number = 1u << (weights[i] - 1) << (MOST_BITS - longest), *from = &starts[weights[i]];
            uint16_t entry = (uint16_t)(i << 8 | (size_t)(longest + 1 - weights[i]));
            for (uint32_t k = 0; k < number; k++)
                table[*from + k] = entry;
            *from += number;
        }
    return used;
}

struct NAME(source) {
    const u8 *begin, *at; /* at: eight bytes of which `bits` are what is left, and a bit behind them */
    uint64_t bits;
    u8 *out;
};

/* Five codes of a stream. `used` bits of the eight bytes are then done: at most 8 + 5 * 11, so the bit behind them is
 * still there. */
#define TAKE_CODES(source)                                                                                             \
    {                                                                                                                  \
        for (int j = 0; j < 5; j++) {                                                                                  \
            uint16_t entry = table[source.bits >> (64 - MOST_BITS)];                                                   \
            source.bits <<= entry & 63;                                                                                \
            source.out[j] = (u8)(entry >> 8);                                                                          \
        }                                                                                                              \
        source.out += 5;                                                                                               \
        REFILL(source)                                                                                                 \
    }

/* The same with a table that has two values for most of its entries: their codes fit into 11 bits. */
#define TAKE_PAIRS(source)                                                                                             \
    {                                                                                                                  \
        for (int j = 0; j < 5; j++) {                                                                                  \
            uint32_t entry = pairs[source.bits >> (64 - MOST_BITS)];                                                   \
            uint16_t both = (uint16_t)(entry >> 16);                                                                   \
            source.bits <<= entry & 63;                                                                                \
            memcpy(source.out, &both, 2);                                                                              \
            source.out += entry >> 8 & 255;                                                                            \
        }                                                                                                              \
        REFILL(source)                                                                                                 \
    }

#define REFILL(source)                                                                                                 \
    int used = __builtin_ctzll(source.bits);                                                                           \
    source.at -= used >> 3;                                                                                            \
    memcpy(&source.bits, source.at, 8);                                                                                \
    source.bits = (source.bits | 1) << (used & 7);

/* As long as each of the streams a to d has `values` more values and 7 more bytes, which is the most that a round takes. */
#define TAKE_ALL(TAKE, values)                                                                                         \
    for (;;) {                                                                                                         \
        size_t rounds = LEAST(LEAST(ROUNDS(a, 0, values), ROUNDS(b, 1, values)),                                       \
                              LEAST(ROUNDS(c, 2, values), ROUNDS(d, 3, values)));                                      \
        if (!rounds)                                                                                                   \
            break;                                                                                                     \
        for (; rounds; rounds--) {                                                                                     \
            TAKE(a)                                                                                                    \
            TAKE(b)                                                                                                    \
            TAKE(c)                                                                                                    \
            TAKE(d)                                                                                                    \
        }                                                                                                              \
    }
#define LEAST(x, y) ((x) < (y) ? (x) : (y))
#define ROUNDS(s, k, values) LEAST((size_t)(stops[k] - s.out) / values, (size_t)(s.at - s.begin) / 7)

static void NAME(pair_table)(const uint16_t *table, uint32_t *pairs)
{
    for (uint32_t i = 0; i < 1 << MOST_BITS; i++) {
        uint32_t one = table[i], length = one & 63, two = table[i << length & ((1 << MOST_BITS) - 1)];
        int fits = length + (two & 63) <= MOST_BITS;
        pairs[i] = (one >> 8) << 16 | (fits ? (two >> 8) << 24 | 2u << 8 | (length + (two & 63)) : 1u << 8 | length);
    }
}

/* Decodes the four streams of a block into `count` values. Returns 0 unless each stream has exactly its values. */
static int NAME(read_streams)(const u8 *in, size_t size, const uint16_t *table, u8 *out, size_t count)
{
    struct NAME(backwards) rest[4];
    size_t sizes[4], left = (count + 3) / 4, total = 6, counts[4] = {left, left, left, count - 3 * left}, least = size;
    if (size < 10)
        return 0;
    for (size_t k = 0; k < 3; k++) {
        sizes[k] = (size_t)(in[2 * k] | in[2 * k + 1] << 8);
        total += sizes[k];
    }
    if (total >= size)
        return 0;
    sizes[3] = size - total;
    struct NAME(source) s[4];
    u8 *stops[4];
    in += 6;
    for (size_t k = 0; k < 4; k++) {
        if (!NAME(start)(&rest[k], in, sizes[k]))
            return 0;
        least = sizes[k] < least ? sizes[k] : least;
        s[k].begin = in;
        s[k].out = out;
        in += sizes[k];
        stops[k] = out += counts[k];
    }
    if (least >= 8) {
        for (size_t k = 0; k < 4; k++) {
            s[k].at = s[k].begin + sizes[k] - 8;
            memcpy(&s[k].bits, s[k].at, 8);
            s[k].bits = (s[k].bits | 1) << (8 * sizes[k] - (size_t)rest[k].left);
        }
        struct NAME(source) a = s[0], b = s[1], c = s[2], d = s[3];
        if (count >= 4096 && 8 * size < 6 * count) { /* codes are short, and a table of pairs is worth making */
            uint32_t pairs[1 << MOST_BITS];
            NAME(pair_table)(table, pairs);
            TAKE_ALL(TAKE_PAIRS, 10)
        }
        TAKE_ALL(TAKE_CODES, 5)
        s[0] = a;
        s[1] = b;
        s[2] = c;
        s[3] = d;
        for (size_t k = 0; k < 4; k++)
            rest[k].left = 8 * (s[k].at - s[k].begin) + 64 - __builtin_ctzll(s[k].bits);
    }
    for (size_t k = 0; k < 4; k++) {
        for (; s[k].out < stops[k]; s[k].out++) {
            uint16_t entry = table[NAME(peek)(&rest[k], MOST_BITS)];
            *s[k].out = (u8)(entry >> 8);
            rest[k].left -= entry & 63;
            if (rest[k].left < 0)
                return 0;
        }
        if (rest[k].left)
            return 0;
    }
    return 1;
}

#undef TAKE_CODES
#undef TAKE_PAIRS
#undef TAKE_ALL
#undef REFILL
#undef ROUNDS
#undef LEAST

/* Decodes a frame of exactly `count` values. Returns 0 if it is not one that huffman.h writes; `out` is then changed. */
static int NAME(read_literals)(const u8 *in, size_t size, u8 *out, size_t count)
{
    uint16_t table[1 << MOST_BITS];
    size_t wide = count < 256 ? 1 : count < 65792 ? 2 : 4;
    uint32_t magic, content = 0, head = 0;
    if (size < 5 + wide || count > MOST_LITERALS)
        return 0;
    memcpy(&magic, in, 4);
    memcpy(&content, in + 5, wide);
    if (magic != 0xFD2FB528 || in[4] != (wide == 1 ? 0x20 : wide == 2 ? 0x60 : 0xA0))
        return 0;
    if (content != (wide == 2 ? count - 256 : count))
        return 0;
    in += 5 + wide;
    size -= 5 + wide;
    while (!(head & 1)) {
        if (size < 3)
            return 0;
        head = (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16;
        in += 3;
        size -= 3;
        size_t block = head >> 3, body = (head & 6) == 2 ? 1 : block, values = block;
        if (body > size || body > LITERALS)
            return 0;
        if ((head & 6) < 4) {
            if (values > count || values > LITERALS)
                return 0;
            if ((head & 6) == 2)
                memset(out, in[0], values);
            else
                memcpy(out, in, values);
        } else if ((head & 6) == 4) {
            uint64_t sizes = 0;
            size_t wide_head, step, streams, used;
            if (body < 6 || (in[0] & 3) != 2 || !(in[0] & 12))
                return 0;
            wide_head = 2 + (size_t)(in[0] >> 2 & 3);
            step = wide_head == 3 ? 10 : wide_head == 4 ? 14 : 18;
            memcpy(&sizes, in, wide_head);
            values = (size_t)(sizes >> 4) & (((size_t)1 << step) - 1);
            streams = (size_t)(sizes >> (4 + step)) & (((size_t)1 << step) - 1);
            if (values < LEAST_LITERALS || values > LITERALS || values > count || body >= values)
                return 0;
            if (wide_head + streams + 1 != body || in[body - 1] != 0)
                return 0;
            used = NAME(read_table)(in + wide_head, streams, table);
            if (!used || !NAME(read_streams)(in + wide_head + used, streams - used, table, out, values))
                return 0;
        } else
            return 0;
        in += body;
        size -= body;
        out += values;
        count -= values;
    }
    return size == 0 && count == 0;
}
