/* Bytes as a zstd frame that has only Huffman-coded literals: blocks of 128 KiB, each with a table of its own, four
 * streams and no matches. `formats/codecs/literals.py` has the same steps, with the reasons; both make the same bytes.
 */
#define LITERALS (1 << 17) /* values of a block */
#define MOST_BITS 11       /* of a code */
#define WEIGHTS_LOG 6      /* the table of the weights' codes has 64 entries */
#define LEAST_LITERALS 64  /* fewer are not coded */
#define MOST_LITERALS (1 << 20)

#ifndef CKPTSTORE_HUFFMAN
#define CKPTSTORE_HUFFMAN
/* One block: how it is stored, its table and its sizes in bytes. `kind` is zstd's: 0 as it is, 1 one value, 2 coded. */
struct literals {
    size_t count;
    int kind;
    u8 lengths[256];
    u8 tree[160];
    size_t tree_size, streams[4], head, size; /* size: of all after the block's header of three bytes */
};
#endif

/* Sorts the symbols that occur by their count, those of one count by symbol: by bytes of the key, lowest first. */
static size_t NAME(by_count)(const uint32_t *counts, uint32_t *keys)
{
    size_t number = 0;
    uint32_t other[256];
    for (uint32_t symbol = 0; symbol < 256; symbol++)
        if (counts[symbol])
            keys[number++] = counts[symbol] << 8 | symbol; /* at most 2**17 */
    for (int shift = 8; shift < 32; shift += 8) {
        size_t starts[256] = {0}, at = 0;
        for (size_t i = 0; i < number; i++)
            starts[keys[i] >> shift & 255]++;
        for (size_t i = 0; i < 256; i++) {
            size_t size = starts[i];
            starts[i] = at;
            at += size;
        }
        for (size_t i = 0; i < number; i++)
            other[starts[keys[i] >> shift & 255]++] = keys[i];
        memcpy(keys, other, number * sizeof *keys);
    }
    return number;
}

/* Lengths of the codes: Huffman's, then cut to MOST_BITS. `keys` are two or more, ascending by count. */
static void NAME(code_lengths)(const uint32_t *keys, size_t number, u8 *lengths)
{
    uint32_t sums[511];
    uint16_t parents[511];
    u8 depths[511];
    size_t leaf = 0, inner = number, made = number;
    for (size_t i = 0; i < number; i++)
        sums[i] = keys[i] >> 8;
    for (; made < 2 * number - 1; made++) { /* of equal sums, leaves first */
        size_t pair[2];
        for (size_t k = 0; k < 2; k++)
            pair[k] = leaf < number && (inner == made || sums[leaf] <= sums[inner]) ? leaf++ : inner++;
        sums[made] = sums[pair[0]] + sums[pair[1]];
        parents[pair[0]] = parents[pair[1]] = (uint16_t)made;
    }
    depths[made - 1] = 0;
    for (size_t i = made - 1; i-- > 0;)
        depths[i] = (u8)(depths[parents[i]] + 1); /* at most 255 */
    int used = 0; /* of 2**MOST_BITS codes of the greatest length */
    for (size_t i = 0; i < number; i++) {
        depths[i] = depths[i] < MOST_BITS ? depths[i] : MOST_BITS;
        used += 1 << (MOST_BITS - depths[i]);
    }
    for (size_t i = 0; used > 1 << MOST_BITS; i = i + 1 < number ? i + 1 : 0) /* the rarest are made longer */
        if (depths[i] < MOST_BITS)
            used -= 1 << (MOST_BITS - ++depths[i]);
    for (size_t i = number; used < 1 << MOST_BITS; i = i ? i : number) /* the most frequent shorter, while it fits */
        for (i--; depths[i] > 1 && used + (1 << (MOST_BITS - depths[i])) <= 1 << MOST_BITS;)
            used += 1 << (MOST_BITS - depths[i]--);
    memset(lengths, 0, 256);
    for (size_t i = 0; i < number; i++)
        lengths[keys[i] & 255] = depths[i];
}

/* Appends bits to a small array, lowest first. */
struct NAME(bits) {
    u8 *at;
    uint64_t held;
    int number;
};

static inline void NAME(add)(struct NAME(bits) *bits, uint32_t value, int number)
{
    bits->held |= (uint64_t)value << bits->number;
    for (bits->number += number; bits->number >= 8; bits->number -= 8, bits->held >>= 8)
        *bits->at++ = (u8)bits->held;
}

/* The weights as an FSE stream after its table; returns their bytes, or 0 if they are all the same. */
static size_t NAME(coded_weights)(const u8 *weights, size_t count, u8 *out)
{
    enum { SIZE = 1 << WEIGHTS_LOG };
    uint32_t counts[MOST_BITS + 1] = {0}, shares[MOST_BITS + 1] = {0}, left = SIZE, top = 0;
    for (size_t i = 0; i < count; i++)
        counts[weights[i]]++;
    for (uint32_t k = 0; k <= MOST_BITS; k++)
        top = counts[k] > counts[top] ? k : top;
    if (counts[top] == count)
        return 0; /* such a table cannot be described */
    for (uint32_t k = 0; k <= MOST_BITS; k++)
        if (counts[k] && k != top) {
            shares[k] = (uint32_t)((2 * SIZE * counts[k] + count) / (2 * count));
            shares[k] = shares[k] ? shares[k] : 1;
            left -= shares[k];
        }
    if (left < 1 || left > SIZE)
        return 0;
    shares[top] = left;
    /* The shares, each in as few bits as what is left needs. */
    struct NAME(bits) bits = {out, 0, 0};
    NAME(add)(&bits, WEIGHTS_LOG - 5, 4);
    uint32_t remaining = SIZE + 1, threshold = SIZE, k = 0;
    int width = WEIGHTS_LOG + 1;
    while (remaining > 1) {
        uint32_t value = shares[k] + 1, spare = 2 * threshold - 1 - remaining;
        remaining -= shares[k++];
        if (value >= threshold)
            value += spare;
        NAME(add)(&bits, value, width - (value < spare));
        for (; remaining < threshold && threshold > 1; threshold >>= 1)
            width--;
        if (value == 1) { /* how many more are zero */
            uint32_t zeros = 0;
            while (!shares[k + zeros])
                zeros++; /* what is left has a share */
            k += zeros;
            for (; zeros >= 3; zeros -= 3)
                NAME(add)(&bits, 3, 2);
            NAME(add)(&bits, zeros, 2);
        }
    }
    if (bits.number)
        *bits.at++ = (u8)bits.held;
    /* The states, spread over the table. */
    u8 spread[SIZE];
    uint16_t states[SIZE];
    uint32_t first[MOST_BITS + 2] = {0}, at = 0;
    for (uint32_t s = 0; s <= MOST_BITS; s++) {
        first[s + 1] = first[s] + shares[s];
        for (uint32_t i = 0; i < shares[s]; i++, at = (at + SIZE / 2 + SIZE / 8 + 3) % SIZE)
            spread[at] = (u8)s;
    }
    uint32_t next[MOST_BITS + 1];
    memcpy(next, first, sizeof next);
    for (uint32_t i = 0; i < SIZE; i++)
        states[next[spread[i]]++] = (uint16_t)(SIZE + i);
    /* Two states take turns, from the last weight to the first. The first weight of each costs nothing. */
    struct NAME(bits) stream = {bits.at, 0, 0};
    uint32_t state[2] = {0, 0};
    for (size_t i = count; i-- > 0;) {
        uint32_t share = shares[weights[i]], *of = &state[i & 1], number = 0;
        if (!*of)
            *of = share;
        else {
            uint32_t most = WEIGHTS_LOG - (share > 1 ? 31 - (uint32_t)__builtin_clz(share - 1) : 0);
            number = *of >= share << most ? most : most - 1;
            NAME(add)(&stream, *of & ((1u << number) - 1), (int)number);
        }
        *of = states[first[weights[i]] + (*of >> number) - share];
    }
    NAME(add)(&stream, state[1] - SIZE, WEIGHTS_LOG);
    NAME(add)(&stream, state[0] - SIZE, WEIGHTS_LOG);
    NAME(add)(&stream, 1, 1);
    if (stream.number)
        *stream.at++ = (u8)stream.held;
    return (size_t)(stream.at - out);
}

/* Writes the description of a table to `tree`; returns its bytes, or 0 if the format has none for it. */
static size_t NAME(describe)(const u8 *lengths, u8 *tree)
{
    u8 weights[256], longest = 0;
    size_t last = 255;
    while (!lengths[last])
        last--;
    for (size_t i = 0; i <= last; i++)
        longest = lengths[i] > longest ? lengths[i] : longest;
    for (size_t i = 0; i < last; i++) /* that of the last one follows from the others */
        weights[i] = (u8)(lengths[i] ? longest + 1 - lengths[i] : 0);
    size_t coded = last > 2 ? NAME(coded_weights)(weights, last, tree + 1) : 0, plain = (last + 1) / 2;
    if (coded && coded < 128 && (last > 128 || coded < plain)) {
        tree[0] = (u8)coded;
        return 1 + coded;
    }
    if (last > 128)
        return 0;
    tree[0] = (u8)(127 + last);
    weights[last] = 0;
    for (size_t i = 0; i < plain; i++)
        tree[1 + i] = (u8)(weights[2 * i] << 4 | weights[2 * i + 1]);
    return 1 + plain;
}

/* Chooses how a block is stored. */
static void NAME(plan_literals)(const u8 *values, size_t count, struct literals *block)
{
    uint32_t counts[4][256], all[256], keys[256];
    size_t quarter = (count + 3) / 4, bits;
    block->count = block->size = count;
    block->kind = 0;
    if (count < LEAST_LITERALS)
        return;
    memset(counts, 0, sizeof counts);
    const u8 *a = values, *b = a + quarter, *c = b + quarter, *d = c + quarter;
    size_t last = count - 3 * quarter;
    for (size_t i = 0; i < last; i++) {
        counts[0][a[i]]++;
        counts[1][b[i]]++;
        counts[2][c[i]]++;
        counts[3][d[i]]++;
    }
    for (size_t i = last; i < quarter; i++) {
        counts[0][a[i]]++;
        counts[1][b[i]]++;
        counts[2][c[i]]++;
    }
    for (size_t i = 0; i < 256; i++)
        all[i] = counts[0][i] + counts[1][i] + counts[2][i] + counts[3][i];
    size_t number = NAME(by_count)(all, keys);
    if (number == 1) {
        block->kind = 1;
        block->size = 1;
        return;
    }
    NAME(code_lengths)(keys, number, block->lengths);
    block->tree_size = NAME(describe)(block->lengths, block->tree);
    if (!block->tree_size)
        return;
    size_t size = block->tree_size + 6;
    for (size_t k = 0; k < 4; k++) {
        bits = 1; /* which ends the stream */
        for (size_t i = 0; i < 256; i++)
            bits += (size_t)counts[k][i] * block->lengths[i];
        block->streams[k] = (bits + 7) / 8;
        size += block->streams[k];
    }
    block->head = count < 1 << 10 ? 3 : count < 1 << 14 ? 4 : 5;
    if (block->head + size + 1 >= count - count / 64 || block->streams[0] > 65535 || block->streams[1] > 65535 ||
        block->streams[2] > 65535)
        return;
    block->kind = 2;
    block->size = block->head + size + 1;
}

/* Bits of a stream: the last ones are the highest of `held`, and `number` of them are not written yet. */
struct NAME(stream) {
    const u8 *from;
    u8 *to, *end;
    uint64_t held;
    uint64_t number;
    size_t left;
};

/* Adds `values` codes and writes whole bytes. An entry has its code in its highest bits and the length in its lowest
 * byte, which reaches no bit that is written: 7 + values * longest is at most 56. */
#define ADD_CODES(stream, values)                                                                                      \
    {                                                                                                                  \
        for (int j = 1; j <= values; j++) {                                                                            \
            uint64_t entry = entries[stream.from[-j]];                                                                 \
            stream.held = stream.held >> (entry & 63) | entry;                                                         \
            stream.number += entry;                                                                                    \
        }                                                                                                              \
        stream.from -= values;                                                                                         \
        stream.number &= 63;                                                                                           \
        uint64_t whole = stream.held >> (64 - stream.number & 63);                                                     \
        memcpy(stream.to, &whole, 8);                                                                                  \
        stream.to += stream.number >> 3;                                                                               \
        stream.to = stream.to < stream.end - 8 ? stream.to : stream.end - 8; /* values were changed meanwhile */       \
        stream.number &= 7;                                                                                            \
    }

/* Two streams at once, because each code of a stream waits for the one before. A write of eight bytes stays within a
 * stream as long as it has LEAST more values, of a bit or more each. */
#define ADD_ALL(values)                                                                                                \
    {                                                                                                                  \
        size_t rounds = least > LEAST ? (least - LEAST) / values : 0;                                                  \
        for (size_t i = 0; i < rounds; i++) {                                                                          \
            ADD_CODES(one, values)                                                                                     \
            ADD_CODES(two, values)                                                                                     \
        }                                                                                                              \
        one.left -= rounds * values;                                                                                   \
        two.left -= rounds * values;                                                                                   \
    }

static void NAME(put_two)(const uint64_t *restrict entries, int longest, struct NAME(stream) *first,
                          struct NAME(stream) *second)
{
    enum { LEAST = 72 };
    struct NAME(stream) one = *first, two = *second;
    size_t least = one.left < two.left ? one.left : two.left;
    if (longest > 9)
        ADD_ALL(4)
    else if (longest > 7)
        ADD_ALL(5)
    else
        ADD_ALL(7)
    *first = one;
    *second = two;
}

static void NAME(put_rest)(const uint64_t *entries, struct NAME(stream) *stream)
{
    uint64_t held = stream->number ? stream->held >> (64 - stream->number) : 0;
    uint64_t number = stream->number;
    for (; stream->left; stream->left--) {
        uint64_t entry = entries[*--stream->from], length = entry & 63;
        held |= length ? entry >> (64 - length) << number : 0;
        for (number += length; number >= 8; number -= 8, held >>= 8)
            if (stream->to < stream->end)
                *stream->to++ = (u8)held;
    }
    if (stream->to < stream->end)
        *stream->to = (u8)(held | 1u << number);
}

#undef ADD_CODES
#undef ADD_ALL

/* Writes four streams, each from its last value to its first. `out` has exactly their bytes. */
static void NAME(put_literals)(const u8 *values, const struct literals *block, u8 *out)
{
    uint64_t entries[256];
    uint32_t next[MOST_BITS + 2], of[MOST_BITS + 2] = {0}, at = 0;
    int longest = 1;
    for (size_t i = 0; i < 256; i++)
        of[block->lengths[i]]++;
    for (int length = MOST_BITS; length; length--) {
        longest = of[length] && length > longest ? length : longest;
        next[length] = at;
        at = (at + of[length]) >> 1;
    }
    for (size_t i = 0; i < 256; i++) { /* values that do not occur get no bits: changed meanwhile by another thread */
        unsigned length = block->lengths[i];
        entries[i] = length ? (uint64_t)next[length]++ << (64 - length) | length : 0;
    }
    size_t quarter = (block->count + 3) / 4;
    struct NAME(stream) streams[4];
    for (size_t k = 0; k < 4; k++) {
        size_t size = k < 3 ? quarter : block->count - 3 * quarter;
        u8 *end = out + block->streams[k];
        streams[k] = (struct NAME(stream)){values + k * quarter + size, out, end, 0, 0, size};
        out = end;
    }
    NAME(put_two)(entries, longest, &streams[0], &streams[1]);
    NAME(put_two)(entries, longest, &streams[2], &streams[3]);
    for (size_t k = 0; k < 4; k++)
        NAME(put_rest)(entries, &streams[k]);
}

/* Writes the frame if it has at most `most` bytes. Returns its size, or 0 with nothing written. */
static size_t NAME(literals)(const u8 *values, size_t count, u8 *out, size_t most)
{
    struct literals blocks[MOST_LITERALS / LITERALS];
    size_t number = (count + LITERALS - 1) / LITERALS, wide = count < 256 ? 1 : count < 65792 ? 2 : 4;
    size_t size = 5 + wide;
    for (size_t i = 0; i < number; i++) {
        size_t start = i * LITERALS;
        NAME(plan_literals)(values + start, count - start < LITERALS ? count - start : LITERALS, &blocks[i]);
        size += 3 + blocks[i].size;
    }
    if (!number || size > most)
        return 0;
    uint32_t magic = 0xFD2FB528, content = (uint32_t)(wide == 2 ? count - 256 : count);
    memcpy(out, &magic, 4);
    out[4] = (u8)(0x20 | (wide == 1 ? 0 : wide == 2 ? 0x40 : 0x80)); /* one segment: no window */
    memcpy(out + 5, &content, wide);
    out += 5 + wide;
    for (size_t i = 0; i < number; i++) {
        const struct literals *block = &blocks[i];
        uint32_t head = (uint32_t)((block->kind == 1 ? block->count : block->size) << 3) | (uint32_t)block->kind << 1;
        head |= i + 1 == number;
        memcpy(out, &head, 3);
        out += 3;
        if (block->kind < 2)
            memcpy(out, values, block->size);
        else {
            size_t streams = 6 + block->tree_size, step = block->head == 3 ? 10 : block->head == 4 ? 14 : 18;
            for (size_t k = 0; k < 4; k++)
                streams += block->streams[k];
            uint64_t sizes = 2 | (uint64_t)(block->head - 2) << 2 | (uint64_t)block->count << 4;
            sizes |= (uint64_t)streams << (4 + step);
            u8 *at = out;
            memcpy(at, &sizes, block->head);
            at += block->head;
            memcpy(at, block->tree, block->tree_size);
            at += block->tree_size;
            for (size_t k = 0; k < 3; k++, at += 2)
                memcpy(at, &block->streams[k], 2);
            NAME(put_literals)(values, block, at);
            out[block->size - 1] = 0; /* no sequences */
        }
        out += block->size;
        values += block->count;
    }
    return size;
}
