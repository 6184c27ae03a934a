/* Reads groups and pieces as formats/codecs/blocks.py and plane_coder.py read them. Frames that have matches are decoded
 * in Python. Whatever is not as the page says ends reading, with nothing written beside `space`: the caller then runs the
 * reference, which says what is wrong.
 */
struct reader {
    const struct loops *loops;
    const u8 *data;
    size_t at, end;
    u8 *space;
    size_t used, size;
    int failed;
    PyObject *decompress; /* of a frame and the number of its values */
    PyThreadState *state; /* NULL while the interpreter lock is held */
};

/* A group that was read: planes of all words, or few words that are not small. */
struct group {
    int narrow; /* bits, 0 or 4; -1: planes */
    struct plane planes[9];
    size_t number;
    const u8 *small; /* of 4 bits; NULL: all 0 */
    u32 *where;      /* ascending, and one more behind that no word has */
    u8 *greater;     /* words less 2**narrow */
};

static const u8 *taken(struct reader *r, size_t count)
{
    if (r->failed || count > r->end - r->at) {
        r->failed = 1;
        return NULL;
    }
    r->at += count;
    return r->data + r->at - count;
}

static size_t number_of(struct reader *r)
{
    uint32_t number = 0;
    const u8 *from = taken(r, 4);
    if (from)
        memcpy(&number, from, 4);
    return number;
}

static u8 *reserved(struct reader *r, size_t bytes)
{
    size_t at = ((r->used + 63) & ~(size_t)63) + 5 * 64; /* arrays a power of two apart share places in the cache */
    if (r->failed || at > r->size || bytes > r->size - at) {
        r->failed = 1;
        return NULL;
    }
    r->used = at + bytes;
    return r->space + at;
}

/* Decodes a frame in Python, with the interpreter lock. */
static void get_matches(struct reader *r, const u8 *frame, size_t size, u8 *values, size_t count)
{
    if (r->state)
        PyEval_RestoreThread(r->state);
    PyObject *found =
        PyObject_CallFunction(r->decompress, "y#n", (const char *)frame, (Py_ssize_t)size, (Py_ssize_t)count);
    char *bytes = NULL;
    Py_ssize_t length = 0;
    r->failed = found == NULL || PyBytes_AsStringAndSize(found, &bytes, &length) || (size_t)length != count;
    if (r->failed)
        PyErr_Clear(); /* the reference says what is wrong */
    else
        memcpy(values, bytes, count);
    Py_XDECREF(found);
    if (r->state)
        r->state = PyEval_SaveThread();
}

static const u8 *get_piece(struct reader *r, size_t count, int depth);

/* The numbers of steps and exceptions among `count` values, then the steps. */
static const u8 *get_steps(struct reader *r, size_t count, size_t *steps, size_t *exceptions, int depth)
{
    *steps = number_of(r);
    *exceptions = number_of(r);
    if (r->failed || *exceptions > count || *steps > *exceptions + count / 255) {
        r->failed = 1;
        return NULL;
    }
    return get_piece(r, *steps, depth + 1);
}

static u8 *get_packed(struct reader *r, size_t count, int bits, int depth)
{
    u8 *values = reserved(r, count);
    size_t steps = 0, exceptions = 0, begin = r->used;
    if (r->failed)
        return NULL;
    if (bits) {
        const u8 *small = get_piece(r, (count * (size_t)bits + 7) / 8, depth + 1);
        if (r->failed)
            return NULL;
        r->loops->unpack_small(small, bits, values, count);
    } else
        memset(values, 0, count);
    const u8 *stepped = get_steps(r, count, &steps, &exceptions, depth);
    const u8 *greater = r->failed ? NULL : get_piece(r, exceptions, depth + 1);
    if (r->failed || !r->loops->put[0](stepped, steps, greater, exceptions, (uint64_t)1 << bits, values, count)) {
        r->failed = 1;
        return NULL;
    }
    r->used = begin;
    return values;
}

/* plane_coder.decode */
static const u8 *get_piece(struct reader *r, size_t count, int depth)
{
    const u8 *from = taken(r, 1);
    u8 *values;
    size_t size;
    if (r->failed)
        return NULL;
    switch (*from) {
    case RAW_MODE:
        return taken(r, count);
    case FILL_MODE:
        from = taken(r, 1);
        values = reserved(r, count);
        if (!r->failed)
            memset(values, *from, count);
        return values;
    case ZSTD_MODE:
        size = number_of(r);
        from = taken(r, size);
        values = reserved(r, count);
        if (!r->failed && !r->loops->read_literals(from, size, values, count))
            get_matches(r, from, size, values, count);
        return values;
    case SPARSE_MODE:
    case PACK1_MODE:
    case PACK2_MODE:
    case PACK4_MODE:
        if (depth < DEPTH)
            return get_packed(r, count, bits_of(*from), depth);
        /* fall through */
    default:
        r->failed = 1;
        return NULL;
    }
}

static void get_group(struct reader *r, size_t word, size_t count, struct group *group, int nested);

static void get_narrow(struct reader *r, size_t word, size_t count, int bits, struct group *group)
{
    size_t steps = 0, exceptions = 0;
    group->narrow = bits;
    if (bits) {
        const u8 *packed = get_piece(r, (count * (size_t)bits + 7) / 8, 1);
        u8 *small = reserved(r, count);
        if (r->failed)
            return;
        r->loops->unpack_small(packed, bits, small, count);
        group->small = small;
    }
    const u8 *stepped = get_steps(r, count, &steps, &exceptions, 1);
    u32 *where = (u32 *)reserved(r, 4 * (exceptions + 1));
    if (r->failed)
        return;
    size_t at = 0, found = 0;
    for (size_t k = 0; k < steps; k++) {
        u8 step = stepped[k];
        at += step;
        if (step < 255) {
            if (at >= count || found >= exceptions) {
                r->failed = 1;
                return;
            }
            where[found++] = (uint32_t)at++;
        }
    }
    r->failed = found != exceptions;
    where[exceptions] = UINT32_MAX;
    group->where = where;
    group->number = exceptions;
    if (exceptions && !r->failed) {
        struct group inner = {0};
        u8 *greater = reserved(r, exceptions * word);
        get_group(r, word, exceptions, &inner, 1);
        if (r->failed)
            return;
        if (inner.number)
            r->loops->combine[word == 2 ? 1 : word == 4 ? 2 : 3](inner.planes, inner.number, PUT, NULL, greater,
                                                                  exceptions);
        else
            memset(greater, 0, exceptions * word);
        group->greater = greater;
    }
}

/* blocks.read_group, without combining */
static void get_group(struct reader *r, size_t word, size_t count, struct group *group, int nested)
{
    const u8 *form = taken(r, 1);
    group->narrow = -1;
    group->number = 0;
    if (r->failed || *form == ZERO_GROUP)
        return;
    if (word > 1 && !nested && (*form == NARROW || *form == NARROW + 4)) {
        get_narrow(r, word, count, *form - NARROW, group);
        return;
    }
    if (*form > word || (*form != 0 && *form != 2 && *form != 4 && *form != word)) {
        r->failed = 1;
        return;
    }
    if (*form) {
        size_t wide = *form;
        const u8 *low = taken(r, count * wide);
        group->planes[group->number++] = (struct plane){(void *)(uintptr_t)low, wide};
    }
    for (size_t i = *form; i < word && !r->failed; i++)
        group->planes[group->number++] = (struct plane){(void *)(uintptr_t)get_piece(r, count, 0), 1};
}

/* The part of a group's planes from word `start` on. */
static size_t planes_from(const struct group *group, size_t start, struct plane *planes)
{
    for (size_t i = 0; i < group->number; i++)
        planes[i] = (struct plane){(u8 *)group->planes[i].at + start * group->planes[i].size, group->planes[i].size};
    return group->number;
}

/* Applies words `start` to `start + size` of a group, at most TILE_WORDS, to `base`. `*next` is the place in `where` of the
 * first one not before them. `base` and `out` are those of word `start`; they may be the same. */
enum { TILE_WORDS = 1024 };

static void apply(const struct loops *loops, const struct group *group, size_t word, int how, const u8 *base, u8 *out,
                  size_t start, size_t size, size_t *next)
{
    size_t index = word == 1 ? 0 : word == 2 ? 1 : word == 4 ? 2 : 3, begin = *next, end = begin;
    uint64_t tile[TILE_WORDS];
    struct plane planes[9];
    if (group->narrow < 0 && group->number) {
        loops->combine[index](planes, planes_from(group, start, planes), how, base, out, size);
        return;
    }
    if (group->narrow >= 0)
        while (group->where[end] < start + size)
            end++;
    *next = end;
    if (begin == end && !group->small) {
        if (how != ADD && how != XOR)
            memset(out, 0, size * word);
        else if (base != out)
            memcpy(out, base, size * word);
        return;
    }
    if (group->small) {
        planes[0] = (struct plane){(void *)(uintptr_t)(group->small + start), 1};
        loops->combine[index](planes, 1, PUT, NULL, tile, size);
    } else
        memset(tile, 0, size * word);
    loops->place[index](group->where + begin, group->greater + begin * word, (uint64_t)1 << group->narrow, start, tile,
                        end - begin);
    planes[0] = (struct plane){tile, word};
    loops->combine[index](planes, 1, how, base, out, size);
}
