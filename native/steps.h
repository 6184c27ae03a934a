/* Optimizer arithmetic: every operation is in fp32 and rounded once (-ffp-contract=off); FUSED is a fused operation.
 *
 * The bits of a computed NaN do not matter, because every NaN is stored as 7fc00000.
 */
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#define SETTLED(x) ((x) == (x) ? (x) : __builtin_nanf(""))

static void NAME(fma_scalar)(const f32 *a, float b, const f32 *c, f32 *out, size_t count)
{
    EACH for (size_t i = 0; i < count; i++) {
        float sum = FUSED(a[i], b, c[i]);
        out[i] = SETTLED(sum);
    }
}

static void NAME(fma_array)(const f32 *a, const f32 *b, const f32 *c, f32 *out, size_t count)
{
    EACH for (size_t i = 0; i < count; i++) {
        float sum = FUSED(a[i], b[i], c[i]);
        out[i] = SETTLED(sum);
    }
}

INLINE void NAME(moments_of)(int variant, int near, f32 *restrict first, f32 *restrict second,
                             const f32 *restrict gradient, float share, float keep, float weight2, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float g = gradient[i], m = first[i], start = near ? m : g, kept = second[i] * keep, v;
        if (variant == PLAIN) {
            m = (g - m) * share + start;
            v = (g * weight2) * g + kept;
        } else {
            m = FUSED(g - m, share, start);
            v = variant == DIVIDE ? FUSED(g * g, weight2, kept) : FUSED(g * weight2, g, kept);
        }
        first[i] = SETTLED(m);
        second[i] = SETTLED(v);
    }
}

static void NAME(moments)(int variant, int near, f32 *first, f32 *second, const f32 *gradient, float share, float keep,
                          float weight2, size_t count)
{
#define CASE(variant, near)                                                                                            \
    case 2 * variant + near:                                                                                           \
        NAME(moments_of)(variant, near, first, second, gradient, share, keep, weight2, count);                         \
        break;
    switch (2 * variant + near) {
        CASE(FMA, 0)
        CASE(FMA, 1)
        CASE(PLAIN, 0)
        CASE(PLAIN, 1)
        CASE(DIVIDE, 0)
        CASE(DIVIDE, 1)
    }
#undef CASE
}

static void NAME(second_moment)(const f32 *first, const f32 *before, const f32 *second, double inverse, float keep,
                                double weight2, f32 *out, size_t count)
{
    EACH for (size_t i = 0; i < count; i++) {
        double m = (double)before[i], g = ((double)first[i] - m) * inverse + m;
        float v = (float)(g * g * weight2 + (double)(second[i] * keep));
        out[i] = SETTLED(v);
    }
}

INLINE void NAME(move_of)(int divide, f32 *weight, const f32 *first, const f32 *second, float shrink, float root,
                          float eps, float rate, size_t count)
{
    EACH for (size_t i = 0; i < count; i++) {
        float scale = __builtin_sqrtf(second[i]) / root + eps, kept = weight[i] * shrink;
        float w = divide ? FUSED(first[i] / scale, rate, kept) : first[i] * rate / scale + kept;
        weight[i] = SETTLED(w);
    }
}

static void NAME(move)(int divide, f32 *weight, const f32 *first, const f32 *second, float shrink, float root,
                       float eps, float rate, size_t count)
{
    if (divide)
        NAME(move_of)(1, weight, first, second, shrink, root, eps, rate, count);
    else
        NAME(move_of)(0, weight, first, second, shrink, root, eps, rate, count);
}

INLINE void NAME(buffered_of)(int plain, int nesterov, f32 *restrict weight, f32 *restrict buffer,
                              const f32 *restrict gradient, float momentum, float share, float rate, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float g = gradient[i], w = weight[i], b, u;
        if (plain) {
            b = g * share + buffer[i] * momentum;
            u = nesterov ? b * momentum + g : b;
            w = u * rate + w;
        } else {
            b = FUSED(g, share, buffer[i] * momentum);
            u = nesterov ? FUSED(b, momentum, g) : b;
            w = FUSED(u, rate, w);
        }
        buffer[i] = SETTLED(b);
        weight[i] = SETTLED(w);
    }
}

static void NAME(buffered)(int plain, int nesterov, f32 *weight, f32 *buffer, const f32 *gradient, float momentum,
                           float share, float rate, size_t count)
{
#define CASE(plain, nesterov)                                                                                          \
    case 2 * plain + nesterov:                                                                                         \
        NAME(buffered_of)(plain, nesterov, weight, buffer, gradient, momentum, share, rate, count);                    \
        break;
    switch (2 * plain + nesterov) {
        CASE(0, 0)
        CASE(0, 1)
        CASE(1, 0)
        CASE(1, 1)
    }
#undef CASE
}

static size_t NAME(missed)(const u32 *values, const u32 *predicted, size_t count)
{
    size_t found = 0;
    for (size_t start = 0; start < count; start += TILE) {
        size_t end = count - start < TILE ? count : start + TILE;
        uint32_t missed = 0;
        for (size_t i = start; i < end; i++)
            missed += values[i] != predicted[i];
        found += missed;
    }
    return found;
}

/* Not inline: as part of a loop, gcc makes it one instruction, which is slow for so few bytes. */
__attribute__((noinline)) static void NAME(copy)(void *out, const void *source, size_t bytes)
{
    memcpy(out, source, bytes);
}

/* Asks for the tile that comes next. The processor's own prefetching ends at each page, which is as long as a tile. */
INLINE void NAME(expect)(const f32 *array, size_t count)
{
    for (size_t i = 0; i < count && i < TILE; i += 16)
        __builtin_prefetch(array + i, 0, 2);
}

/* Zigzag differences; returns how many are not zero. At most TILE. */
INLINE size_t NAME(differ)(const u32 *new, const u32 *guess, u32 *restrict out, size_t count)
{
    uint32_t missed = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t delta = new[i] - guess[i];
        missed += delta != 0;
        out[i] = delta << 1 ^ (0 - (delta >> 31));
    }
    return missed;
}

/* What a step of Adam adds to its predictions: zigzag differences of the first moment to the old one, and of the second
 * moment and the weight to what is predicted. Counts those that are not zero among the first `head` numbers, and among
 * the others (but for the first moment). */
static void NAME(adam_differences)(const struct adam *rule, const f32 *const *old, const f32 *const *new, u32 *const *out,
                                   size_t (*missed)[2], size_t head, size_t count)
{
    for (size_t start = 0; start < count; start += TILE) {
        float guess[TILE];
        size_t size = count - start < TILE ? count - start : TILE;
        const f32 *w = old[0] + start, *m = old[1] + start, *v = old[2] + start;
        const f32 *w1 = new[0] + start, *m1 = new[1] + start, *v1 = new[2] + start;
        size_t next = start + size, left = count - next;
        NAME(expect)(old[1] + next, left);
        NAME(expect)(new[1] + next, left);
        PASTE(difference, 32, ISA)(m1, m, out[1] + start, size);
        missed[1][0] += start < head ? NAME(missed)((const u32 *)m1, (const u32 *)m, size) : 0;
        NAME(expect)(old[2] + next, left);
        NAME(second_moment)(m1, m, v, rule->inverse, rule->beta2, rule->weight2, guess, size);
        NAME(expect)(new[2] + next, left);
        missed[2][start >= head] += NAME(differ)((const u32 *)v1, (const u32 *)guess, out[2] + start, size);
        NAME(expect)(old[0] + next, left);
        NAME(expect)(new[0] + next, left);
        NAME(copy)(guess, w, size * sizeof *guess);
        NAME(move)(rule->divide, guess, m1, v1, rule->shrink, rule->root, rule->eps, rule->rate, size);
        missed[0][start >= head] += NAME(differ)((const u32 *)w1, (const u32 *)guess, out[0] + start, size);
    }
}

/* One step of Adam in place; `item` is the size of the gradient's numbers: 4, or 2 of bf16. */
static void NAME(adam_step)(const struct adam *rule, size_t item, const void *gradient, f32 *weight, f32 *first,
                            f32 *second, size_t count)
{
    for (size_t start = 0; start < count; start += TILE) {
        float g[TILE];
        u32 *patterns = (u32 *)g;
        size_t size = count - start < TILE ? count - start : TILE;
        if (item == 4)
            NAME(copy)(g, (const u32 *)gradient + start, size * sizeof *g);
        else
            for (size_t i = 0; i < size; i++)
                patterns[i] = (uint32_t)((const u16 *)gradient)[start + i] << 16;
        for (size_t k = 0; k < rule->scales; k++)
            for (size_t i = 0; i < size; i++)
                g[i] *= rule->scale[k];
        if (rule->maximize)
            for (size_t i = 0; i < size; i++)
                g[i] = -g[i];
        NAME(moments)(rule->variant, rule->near, first + start, second + start, g, rule->share, rule->beta2,
                      (float)rule->weight2, size);
        NAME(move)(rule->divide, weight + start, first + start, second + start, rule->shrink, rule->root, rule->eps,
                   rule->rate, size);
    }
}

/* Takes the step on copies. Counts the numbers that training computed otherwise, and writes the zigzag differences for
 * each slot that has an array in `out`. */
static void NAME(adam_replayed)(const struct adam *rule, size_t item, const u8 *gradient, const f32 *const *old,
                                const f32 *const *new, u32 *const *out, size_t (*missed)[2], size_t head, size_t count)
{
    for (size_t start = 0; start < count; start += TILE) {
        float state[3][TILE];
        size_t size = count - start < TILE ? count - start : TILE;
        for (size_t i = 0; i < 3; i++) {
            NAME(expect)(old[i] + start + size, count - start - size);
            NAME(copy)(state[i], old[i] + start, size * sizeof *state[i]);
        }
        NAME(adam_step)(rule, item, gradient + start * item, state[0], state[1], state[2], size);
        for (size_t i = 0; i < 3; i++) {
            NAME(expect)(new[i] + start + size, count - start - size);
            const u32 *is = (const u32 *)(new[i] + start), *replayed = (const u32 *)state[i];
            missed[i][start >= head] +=
                out[i] ? NAME(differ)(is, replayed, out[i] + start, size) : NAME(missed)(is, replayed, size);
        }
    }
}

#undef FUSED
#undef SETTLED
