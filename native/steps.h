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

#undef FUSED
#undef SETTLED
