/* The state digest's sums of words times weights, modulo 2**64.
 *
 * FULL_PRODUCTS: the processor multiplies vectors of 64 bits. Otherwise the halves of a weight are separated first, so
 * that each product is one of 32 bits by 32 bits.
 */
static uint64_t NAME(sum)(const u32 *words, const u64 *weights, size_t count)
{
    uint64_t low = 0, high = 0;
    for (size_t i = 0; i < count; i++) {
        if (FULL_PRODUCTS) {
            low += (uint64_t)words[i] * weights[i];
        } else {
            low += (uint64_t)words[i] * (uint32_t)weights[i];
            high += (uint64_t)words[i] * (uint32_t)(weights[i] >> 32);
        }
    }
    return low + (high << 32);
}

/* Four blocks at a time: weights are twice as many bytes as words, and are loaded once for all four. */
static void NAME(four_sums)(const u32 *words, size_t stride, const u64 *weights, size_t count, u64 *sums)
{
    uint64_t low[4] = {0}, high[4] = {0};
    if (FULL_PRODUCTS) {
        for (size_t i = 0; i < count; i++)
            for (size_t k = 0; k < 4; k++)
                low[k] += words[k * stride + i] * weights[i];
    } else {
        for (size_t start = 0; start < count; start += TILE) {
            uint32_t lower[TILE], upper[TILE];
            size_t size = count - start < TILE ? count - start : TILE;
            for (size_t i = 0; i < size; i++) {
                lower[i] = (uint32_t)weights[start + i];
                upper[i] = (uint32_t)(weights[start + i] >> 32);
            }
            for (size_t k = 0; k < 4; k++) {
                const u32 *of = words + k * stride + start;
                uint64_t sum = 0, rest = 0;
                for (size_t i = 0; i < size; i++) {
                    sum += (uint64_t)of[i] * lower[i];
                    rest += (uint64_t)of[i] * upper[i];
                }
                low[k] += sum;
                high[k] += rest;
            }
        }
    }
    for (size_t k = 0; k < 4; k++)
        sums[k] = low[k] + (high[k] << 32);
}
