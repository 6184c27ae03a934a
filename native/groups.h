/* Groups of words and pieces of bytes (SPEC 5.4.2 and 5.4.3), as formats/codecs/blocks.py and plane_coder.py write them.
 *
 * These functions choose and frame; the loops over many values are in `struct loops`. Where matches pay, zstd's compressor
 * is called in Python.
 */
enum { RAW_MODE, FILL_MODE, ZSTD_MODE, SPARSE_MODE, PACK1_MODE, PACK2_MODE, PACK4_MODE, CHOOSE };
enum { MARGIN = 32, OVERHEAD = 16, SPACE = 1 << 17 }; /* bytes beyond those of the words, of the output and eight times of `space` */
enum { SAMPLE = 4096, SAMPLED = 512, SMALL = 48, DEPTH = 2, ZERO_GROUP = 255, NARROW = 16, WINDOW = 8, SEARCHED = 1024, ONE_BIT = 1 << 20 };

struct coder {
    const struct loops *loops;
    const i64 *n_log_n; /* of 0 to SAMPLE, in 2**-20 bits */
    int level;          /* 0: fast; 1: the smallest mode */
    u8 *out;
    size_t at, most;
    u8 *space; /* of which `used` bytes hold arrays */
    size_t used, size;
    int failed;
    PyObject *compress; /* of a level and bytes */
    PyThreadState *state; /* NULL while the interpreter lock is held */
};

/* Calls zstd's compressor with the interpreter lock. Returns the frame's bytes; 0 if it has more than `most`. */
static size_t put_matches(struct coder *c, const u8 *values, size_t count, u8 *out, size_t most)
{
    if (c->state)
        PyEval_RestoreThread(c->state);
    char *frame = NULL;
    Py_ssize_t size = 0;
    PyObject *found = PyObject_CallFunction(c->compress, "iy#", c->level, (const char *)values, (Py_ssize_t)count);
    c->failed = found == NULL || PyBytes_AsStringAndSize(found, &frame, &size);
    if (!c->failed && (size_t)size <= most)
        memcpy(out, frame, (size_t)size);
    Py_XDECREF(found);
    if (c->state)
        c->state = PyEval_SaveThread();
    return (size_t)size <= most ? (size_t)size : 0;
}

static u8 *room(struct coder *c, size_t bytes)
{
    size_t at = ((c->used + 63) & ~(size_t)63) + 5 * 64; /* arrays a power of two apart share places in the cache */
    if (at > c->size || bytes > c->size - at) {
        c->failed = 1;
        return NULL;
    }
    c->used = at + bytes;
    return c->space + at;
}

/* Whether `bytes` more fit into the output. */
static int fits_out(struct coder *c, size_t bytes)
{
    if (bytes > c->most - c->at)
        c->failed = 1;
    return !c->failed;
}

static int bits_of(int mode)
{
    return mode == SPARSE_MODE ? 0 : 1 << (mode - PACK1_MODE);
}

/* ------------------------------------------------------------------------------------------------------ choosing */

/* Copies a sample of values of `item` bytes: eight runs spread evenly, or all. Returns their number. */
static size_t take_sample(const u8 *values, size_t item, size_t count, size_t wanted, u8 *out)
{
    if (count <= wanted) {
        memcpy(out, values, count * item);
        return count;
    }
    size_t run = wanted / 8, stride = count / 8;
    for (size_t i = 0; i < 8; i++)
        memcpy(out + i * run * item, values + i * stride * item, run * item);
    return 8 * run;
}

static double n_log_n(const struct coder *c, size_t count)
{
    return (double)c->n_log_n[count] / 1048576.0;
}

static int64_t information_of(const struct coder *c, const uint32_t *counts, size_t number, size_t *top)
{
    uint64_t found = 0; /* of any table: a signed sum could overflow */
    for (size_t i = 0; i < number; i++) {
        found += (uint64_t)c->n_log_n[counts[i]];
        *top = counts[i] > *top ? counts[i] : *top;
    }
    return (int64_t)found;
}

/* Whether zstd's matches would save more than one bit in 32 of a plane's sample (literals.matches_pay). */
static int matches_pay(const struct coder *c, const u8 *values, size_t count)
{
    size_t runs = count > SEARCHED ? 8 : 1, run = count > SEARCHED ? SEARCHED / 8 : count, unused = 0;
    size_t stride = count > SEARCHED ? count / 8 : 0, total = runs * run;
    uint16_t places[2 * SEARCHED];
    uint32_t counts[256], part[256];
    memset(counts, 0, sizeof counts);
    for (size_t k = 0; k < runs; k++) {
        c->loops->histogram(values + k * stride, run, part);
        for (size_t i = 0; i < 256; i++)
            counts[i] += part[i];
    }
    int64_t least = (int64_t)((uint64_t)c->n_log_n[total] - (uint64_t)information_of(c, counts, 256, &unused));
    least /= (int64_t)total; /* what a value takes without matches: 1 to 8 bits */
    least = least < ONE_BIT ? ONE_BIT : least > 8 * ONE_BIT ? 8 * ONE_BIT : least;
    int64_t saved = 0;
    int bits = 6;
    while ((size_t)1 << bits < 2 * run)
        bits++;
    for (size_t k = 0; k < runs; k++) {
        const u8 *of = values + k * stride;
        memset(places, 0, sizeof *places << bits);
        for (size_t i = 0; i + WINDOW <= run;) {
            uint64_t window, other;
            memcpy(&window, of + i, WINDOW);
            size_t place = (size_t)(window * 0x9E3779B97F4A7C15u >> (64 - bits)), length = 1;
            for (; places[place]; place = (place + 1) & (((size_t)1 << bits) - 1)) {
                memcpy(&other, of + places[place] - 1, WINDOW);
                if (other == window) {
                    const u8 *from = of + places[place] - 1;
                    for (length = WINDOW; i + length < run && of[i + length] == from[length];)
                        length++;
                    int64_t gain = (int64_t)length * least - 22 * ONE_BIT;
                    saved += gain > 0 ? gain : 0;
                    break;
                }
            }
            places[place] = (uint16_t)(i + 1);
            i += length;
        }
    }
    return 32 * saved > (int64_t)total * least;
}

static double frame_cost(const struct coder *c, size_t total, size_t top, int64_t information)
{
    double share = 5 * ((double)top / (double)total - 0.27);
    share = share > 0.0 ? share : 0.0;
    double matches = 0.33 * (double)total * (share < 1.0 ? share : 1.0);
    if (5 * top <= 2 * total)
        return n_log_n(c, total) - (double)information / 1048576.0 + matches;
    size_t rest = total - top;
    double codes = (double)total + n_log_n(c, rest) - (double)information / 1048576.0 + n_log_n(c, top) + matches;
    double runs = 22.0 * (double)rest;
    return codes < runs ? codes : runs;
}

static double exceptions_cost(const struct coder *c, size_t count, int64_t information, size_t total)
{
    double positions = n_log_n(c, total) - n_log_n(c, count) - n_log_n(c, total - count);
    return 1.05 * positions + n_log_n(c, count) - (double)information / 1048576.0 + 0.2 * (double)count;
}

/* plane_coder.choose_mode of at most SAMPLE values. */
static int choose_mode(const struct coder *c, const u8 *values, size_t total, int depth)
{
    uint32_t counts[256], packed[256];
    size_t top = 0, unused = 0;
    c->loops->histogram(values, total, counts);
    int64_t information = information_of(c, counts, 256, &top);
    size_t zeros = counts[0];
    if (top == total)
        return FILL_MODE;
    double best = frame_cost(c, total, top, information);
    int mode = ZSTD_MODE;
    if (best > 7.88 * (double)total)
        return RAW_MODE;
    if (20 * zeros > 19 * total)
        return SPARSE_MODE;
    if (4 * zeros < total)
        return ZSTD_MODE;
    double worth = c->level == 0 ? 0.05 * (1 + 2 * depth) * (double)total : 0.005 * best;
    if (4 * (total - zeros) <= total) {
        double cost = exceptions_cost(c, total - zeros, (int64_t)((uint64_t)information - (uint64_t)c->n_log_n[zeros]), total);
        if (cost < best - worth) {
            if (c->level == 0)
                return SPARSE_MODE;
            best = cost;
            mode = SPARSE_MODE;
        }
    }
    for (int tried = PACK4_MODE; tried >= PACK1_MODE; tried--) {
        size_t bits = (size_t)bits_of(tried), limit = (size_t)1 << bits, per = 8 / bits, exceptions = 0, packed_top = 0;
        for (size_t i = limit; i < 256; i++)
            exceptions += counts[i];
        if (4 * exceptions > total || (c->level == 0 && tried == PACK1_MODE))
            break;
        int64_t greater = information_of(c, counts + limit, 256 - limit, &unused);
        memset(packed, 0, sizeof packed);
        for (size_t i = 0; i < total; i += per) {
            u8 byte = 0;
            for (size_t lane = 0; lane < per && i + lane < total; lane++)
                if (values[i + lane] < limit)
                    byte = (u8)(byte | values[i + lane] << bits * lane);
            packed[byte]++;
        }
        int64_t sum = information_of(c, packed, 256, &packed_top);
        double cost = exceptions_cost(c, exceptions, greater, total);
        cost += frame_cost(c, (total * bits + 7) / 8, packed_top, sum);
        if (cost < best - worth) {
            best = cost;
            mode = tried;
            if (c->level == 0)
                break;
        }
    }
    return mode;
}

/* -------------------------------------------------------------------------------------------------------- pieces */

static void put_piece(struct coder *c, const u8 *values, size_t count, int mode, int depth);

static void put_byte(struct coder *c, unsigned value)
{
    if (fits_out(c, 1))
        c->out[c->at++] = (u8)value;
}

static void put_number(struct coder *c, size_t value)
{
    uint32_t number = (uint32_t)value;
    if (fits_out(c, 4)) {
        memcpy(c->out + c->at, &number, 4);
        c->at += 4;
    }
}

/* The steps to exceptions, and each exception less the limit. `steps` is NULL if both have more than `most` bytes. */
struct exceptions {
    u8 *steps;
    void *greater;
    size_t step_count, count;
};

static struct exceptions separate(struct coder *c, const void *values, size_t item, size_t count, int bits, u8 *rest,
                                  size_t most)
{
    struct exceptions found = {0};
    size_t index = item == 1 ? 0 : item == 2 ? 1 : item == 4 ? 2 : 3;
    found.greater = room(c, most + item);
    u8 *steps = room(c, most + 256);
    if (c->failed)
        return found;
    if (c->loops->exceptions[index](values, (uint64_t)1 << bits, rest, steps, &found.step_count, found.greater,
                                    &found.count, most, count))
        found.steps = steps;
    return found;
}

/* Returns 0 if the packed form might not be smaller than the values. */
static int put_packed(struct coder *c, const u8 *values, size_t count, int mode, int depth)
{
    int bits = bits_of(mode);
    size_t packed = (count * (size_t)bits + 7) / 8, begin = c->used;
    u8 *rest = bits ? room(c, count) : NULL, *small = bits ? room(c, packed) : NULL;
    if (c->failed || packed + 12 > count)
        return 0;
    struct exceptions found = separate(c, values, 1, count, bits, rest, count - 12 - packed);
    if (c->failed || !found.steps) {
        c->used = begin;
        return 0;
    }
    put_byte(c, (unsigned)mode);
    if (bits) {
        c->loops->pack_small(rest, bits, small, count);
        put_piece(c, small, packed, CHOOSE, depth + 1);
    }
    put_number(c, found.step_count);
    put_number(c, found.count);
    put_piece(c, found.steps, found.step_count, c->level == 0 && found.step_count < SAMPLED ? RAW_MODE : ZSTD_MODE,
              depth + 1);
    put_piece(c, found.greater, found.count, c->level && found.count >= SAMPLE ? CHOOSE : ZSTD_MODE, depth + 1);
    c->used = begin;
    return 1;
}

/* plane_coder.encode. The values do not change meanwhile: they are in `space`. */
static void put_piece(struct coder *c, const u8 *values, size_t count, int mode, int depth)
{
    if (c->failed)
        return;
    if (mode == CHOOSE) {
        u8 sample[SAMPLE];
        mode = ZSTD_MODE;
        if (count >= SAMPLED)
            mode = choose_mode(c, sample, take_sample(values, 1, count, depth ? SAMPLE >> 2 : SAMPLE, sample), depth);
    }
    if (mode == FILL_MODE || count < SAMPLED) {
        size_t same = 0;
        while (same < count && values[same] == values[0])
            same++;
        if (count && same == count) {
            put_byte(c, FILL_MODE);
            put_byte(c, values[0]);
            return;
        }
        mode = ZSTD_MODE;
    }
    if (mode >= SPARSE_MODE && depth < DEPTH && count >= SMALL) {
        if (put_packed(c, values, count, mode, depth) || c->failed)
            return;
        mode = ZSTD_MODE;
    }
    if (!fits_out(c, 1 + count))
        return;
    if (mode == ZSTD_MODE && count >= SMALL) {
        size_t size;
        if (matches_pay(c, values, count))
            size = put_matches(c, values, count, c->out + c->at + 5, count - 5);
        else
            size = c->loops->literals(values, count, c->out + c->at + 5, count - 5);
        if (c->failed)
            return;
        if (size) {
            put_byte(c, ZSTD_MODE);
            put_number(c, size);
            c->at += size;
            return;
        }
    }
    put_byte(c, RAW_MODE);
    memcpy(c->out + c->at, values, count);
    c->at += count;
}

/* -------------------------------------------------------------------------------------------------------- groups */

/* How to encode a group (blocks._plan). */
struct plan {
    int narrow; /* bits; -1: planes */
    size_t wide;
    int modes[8];
};

static int any(const u8 *bytes, size_t count)
{
    uint64_t word, found = 0;
    size_t i = 0;
    for (; i + 8 <= count && !found; i += 8) {
        memcpy(&word, bytes + i, 8);
        found |= word;
    }
    for (; i < count; i++)
        found |= bytes[i];
    return found != 0;
}

static struct plan plan_group(struct coder *c, const u8 *words, size_t word, size_t count, int nested)
{
    struct plan plan = {-1, 0, {ZSTD_MODE, ZSTD_MODE, ZSTD_MODE, ZSTD_MODE, ZSTD_MODE, ZSTD_MODE, ZSTD_MODE, ZSTD_MODE}};
    if (count < SMALL) {
        plan.narrow = any(words, count * word) ? -1 : 0;
        return plan;
    }
    size_t begin = c->used, wanted = count / 16;
    wanted = wanted < SAMPLE / 4 ? SAMPLE / 4 : wanted > SAMPLE ? SAMPLE : wanted;
    u8 *sample = room(c, SAMPLE * word), *bytes[8], *low = room(c, SAMPLE);
    struct plane planes[8];
    for (size_t i = 0; i < word; i++) {
        bytes[i] = room(c, SAMPLE);
        planes[i] = (struct plane){bytes[i], 1};
    }
    if (c->failed)
        return plan;
    size_t total = take_sample(words, word, count, wanted, sample), wider = 0;
    c->loops->split[word == 1 ? 0 : word == 2 ? 1 : word == 4 ? 2 : 3](sample, planes, word, total);
    c->used = begin;
    if (word > 1 && !nested) {
        for (size_t i = 0; i < total; i++) {
            u8 above = 0;
            for (size_t k = 1; k < word; k++)
                above |= bytes[k][i];
            wider += above != 0;
            low[i] = above ? 255 : bytes[0][i];
        }
        if (20 * wider <= total) {
            int mode = choose_mode(c, low, total, 0);
            if (mode == FILL_MODE || mode == SPARSE_MODE || mode == PACK4_MODE) {
                plan.narrow = mode == PACK4_MODE ? 4 : 0;
                return plan;
            }
        }
    }
    size_t coded = word;
    for (size_t i = word; i-- > 0;) {
        plan.modes[i] = choose_mode(c, bytes[i], total, 0);
        coded = plan.modes[i] != RAW_MODE ? i : coded;
    }
    plan.wide = coded == word || coded == 4 ? coded : coded < 2 ? 0 : 2;
    return plan;
}

static void put_group(struct coder *c, const u8 *words, size_t word, size_t count, int nested);

static int put_narrow(struct coder *c, const u8 *words, size_t word, size_t count, int bits)
{
    size_t packed = (count * (size_t)bits + 7) / 8, begin = c->used;
    u8 *rest = bits ? room(c, count) : NULL, *small = bits ? room(c, packed) : NULL;
    if (c->failed || packed + 16 > count * word)
        return 0;
    struct exceptions found = separate(c, words, word, count, bits, rest, count * word - 16 - packed);
    if (c->failed || !found.steps) {
        c->used = begin;
        return 0;
    }
    if (!bits && !found.count) {
        put_byte(c, ZERO_GROUP);
        c->used = begin;
        return 1;
    }
    put_byte(c, (unsigned)(NARROW + bits));
    if (bits) {
        c->loops->pack_small(rest, bits, small, count);
        put_piece(c, small, packed, CHOOSE, 1);
    }
    put_number(c, found.step_count);
    put_number(c, found.count);
    put_piece(c, found.steps, found.step_count, c->level == 0 && found.step_count < SAMPLED ? RAW_MODE : ZSTD_MODE, 1);
    if (found.count)
        put_group(c, found.greater, word, found.count, 1);
    c->used = begin;
    return 1;
}

static void put_planes(struct coder *c, const u8 *words, size_t word, size_t count, const struct plan *plan)
{
    struct plane planes[9];
    size_t number = 0, begin = c->used, wide = plan->wide;
    put_byte(c, (unsigned)wide);
    if (wide && fits_out(c, count * wide)) {
        planes[number++] = (struct plane){c->out + c->at, wide};
        c->at += count * wide;
    }
    for (size_t i = wide; i < word; i++)
        planes[number++] = (struct plane){room(c, count), 1};
    if (c->failed)
        return;
    c->loops->split[word == 1 ? 0 : word == 2 ? 1 : word == 4 ? 2 : 3](words, planes, number, count);
    for (size_t i = wide; i < word; i++)
        put_piece(c, planes[i - wide + (wide > 0)].at, count, plan->modes[i], 0);
    c->used = begin;
}

/* blocks.write_group. */
static void put_group(struct coder *c, const u8 *words, size_t word, size_t count, int nested)
{
    size_t begin = c->at;
    struct plan plan = plan_group(c, words, word, count, nested);
    int written = 0;
    if (c->failed)
        return;
    if (plan.narrow == 0 && count < SMALL) {
        put_byte(c, ZERO_GROUP);
        return;
    }
    if (plan.narrow >= 0) {
        written = put_narrow(c, words, word, count, plan.narrow);
        if (!written && !c->failed)
            plan = plan_group(c, words, word, count, 1);
    }
    if (!written && !c->failed && plan.wide < word) {
        put_planes(c, words, word, count, &plan);
        written = 1;
    }
    if (c->failed || (written && c->at - begin <= 1 + count * word))
        return;
    c->at = begin;
    put_byte(c, (unsigned)word);
    if (fits_out(c, count * word)) {
        memcpy(c->out + c->at, words, count * word);
        c->at += count * word;
    }
}

/* ------------------------------------------------------------------------------------------------- small chunks */

/* How a chunk becomes words (chunk_batches.MAPS): its words, turned, folded, less those of the base, or different from it.
 * A kind is one of these times four, plus the width of the words. */
enum { PLAIN_WORDS, TURNED, FOLDED, LESS, DIFFERENT, MAPS };

static int has_base(int kind)
{
    return kind >> 2 == LESS || kind >> 2 == DIFFERENT;
}

/* Writes the payload of one chunk, of at most one block (block_loops.encode). */
static void put_chunk(struct coder *c, int kind, const u8 *new, const u8 *base, size_t length)
{
    size_t index = kind & 3, count = length >> index, tail = length - (count << index), begin = c->at, used = c->used;
    u8 *words = room(c, length);
    if (c->failed)
        return;
    if (kind >> 2 == TURNED)
        c->loops->rotate_left[index](new, words, count);
    else if (kind >> 2 == FOLDED)
        c->loops->zigzag[index](new, words, count);
    else if (kind >> 2 == LESS)
        c->loops->difference[index](new, base, words, count);
    else {
        memcpy(words, new, length);
        struct plane plane = {words, (size_t)1 << index};
        if (kind >> 2 == DIFFERENT)
            c->loops->combine[index](&plane, 1, XOR, base, words, count);
    }
    if (count)
        put_group(c, words, (size_t)1 << index, count, 0);
    if (tail && fits_out(c, tail)) {
        memcpy(c->out + c->at, new + (count << index), tail);
        c->at += tail;
    }
    if (!c->failed && has_base(kind) && !tail && c->at == begin + 1 && c->out[begin] == ZERO_GROUP)
        c->at = begin; /* the chunk equals its base */
    c->used = used;
}
