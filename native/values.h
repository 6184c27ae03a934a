/* Loops over bytes and over fp32 patterns (see words.h). */

/* Values below 2**bits; `bits` is 1, 2 or 4. */
static void NAME(pack_small)(const u8 *values, int bits, u8 *out, size_t count)
{
    size_t per = 8 / (size_t)bits, whole = count / per;
    if (bits == 4) {
        const u16 *pairs = (const u16 *)values;
        for (size_t i = 0; i < whole; i++)
            out[i] = (u8)(pairs[i] | pairs[i] >> 4);
    } else if (bits == 1) {
        const u64 *eights = (const u64 *)values;
        for (size_t i = 0; i < whole; i++)
            out[i] = (u8)((uint64_t)eights[i] * 0x0102040810204080u >> 56);
    } else {
        const u32 *fours = (const u32 *)values;
        for (size_t i = 0; i < whole; i++) {
            uint32_t pair = fours[i] | fours[i] >> 6;
            out[i] = (u8)(pair | pair >> 12);
        }
    }
    if (count % per) {
        u8 last = 0;
        for (size_t lane = 0; lane < count % per; lane++)
            last = (u8)(last | values[whole * per + lane] << (size_t)bits * lane);
        out[whole] = last;
    }
}

static void NAME(unpack_small)(const u8 *packed, int bits, u8 *out, size_t count)
{
    size_t per = 8 / (size_t)bits, whole = count / per;
    if (bits == 4) {
        u16 *pairs = (u16 *)out;
        for (size_t i = 0; i < whole; i++) {
            uint16_t pair = packed[i];
            pairs[i] = (uint16_t)((pair | pair << 4) & 0x0F0F);
        }
    } else if (bits == 1) {
        u64 *eights = (u64 *)out;
        for (size_t i = 0; i < whole; i++) {
            uint64_t each = packed[i] * 0x0101010101010101u & 0x8040201008040201u; /* bit k of byte k */
            eights[i] = (each + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
        }
    } else {
        u32 *fours = (u32 *)out;
        for (size_t i = 0; i < whole; i++) {
            uint32_t four = packed[i];
            four |= four << 12;
            fours[i] = (four | four << 6) & 0x03030303u;
        }
    }
    for (size_t lane = 0; lane < count % per; lane++)
        out[whole * per + lane] = (u8)(packed[whole] >> (size_t)bits * lane & ((1 << bits) - 1));
}

/* Four tables: with one, the increments of equal neighbours would wait for each other. */
static void NAME(histogram)(const u8 *values, size_t count, uint32_t *counts)
{
    uint32_t tables[4][256];
    memset(tables, 0, sizeof tables);
    size_t i = 0;
    for (; i + 4 <= count; i += 4) {
        tables[0][values[i]]++;
        tables[1][values[i + 1]]++;
        tables[2][values[i + 2]]++;
        tables[3][values[i + 3]]++;
    }
    for (; i < count; i++)
        tables[0][values[i]]++;
    for (i = 0; i < 256; i++)
        counts[i] = tables[0][i] + tables[1][i] + tables[2][i] + tables[3][i];
}

static void NAME(to_bfloat16)(const u32 *values, u16 *out, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t value = values[i], rounded = (value + 0x7FFF + (value >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((value & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

static void NAME(to_float16)(const u32 *values, u16 *out, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t value = values[i], magnitude = value & 0x7FFFFFFF, exponent = magnitude >> 23;
        uint32_t normal = (magnitude + (magnitude >> 13 & 1) + 0xC8000FFFu) >> 13;
        uint32_t shift = 126 - (exponent < 112 ? exponent : 112);
        shift = shift < 31 ? shift : 31;
        uint32_t mantissa = (magnitude & 0x7FFFFF) | (exponent ? 0x800000u : 0);
        uint32_t whole = mantissa >> shift, half = 1u << (shift - 1), rest = mantissa & ((1u << shift) - 1);
        uint32_t small = whole + ((rest > half) | ((rest == half) & (whole & 1)));
        uint32_t found = magnitude < 0x38800000 ? small : normal;
        found = magnitude >= 0x47800000 ? 0x7C00 : found;
        found |= value >> 16 & 0x8000;
        out[i] = (uint16_t)(magnitude > 0x7F800000 ? 0x7E00 : found);
    }
}
