/* All loops for one instruction set: ISA is its name, and the compiler's target is set around the inclusion. */
#define TILE 1024 /* words: a tile and its planes stay in the first-level cache, for every word size */

#define BITS 8
#include "words.h"
#undef BITS
#define BITS 16
#include "words.h"
#undef BITS
#define BITS 32
#include "words.h"
#undef BITS
#define BITS 64
#include "words.h"
#undef BITS

#define NAME(name) PASTE(name, of, ISA)
#include "digest.h"
#include "huffman.h"
#include "scales.h"
#include "unhuffman.h"
#include "steps.h"
#include "values.h"

#define STRING_(text) #text
#define STRING(text) STRING_(text)
#define WIDTHS(name) {PASTE(name, 8, ISA), PASTE(name, 16, ISA), PASTE(name, 32, ISA), PASTE(name, 64, ISA)}

static const struct loops GLUE(loops_, ISA) = {
    .name = STRING(ISA),
    .difference = WIDTHS(difference),
    .zigzag = WIDTHS(zigzag),
    .rotate_left = WIDTHS(rotate_left),
    .split = WIDTHS(split),
    .combine = WIDTHS(combine),
    .find = WIDTHS(find),
    .take = WIDTHS(take),
    .exceptions = WIDTHS(exceptions),
    .put = WIDTHS(put),
    .place = WIDTHS(place),
    .classify = WIDTHS(classify),
    .sort = WIDTHS(sort),
    .add_unsorted = WIDTHS(add_unsorted),
    .pack_small = NAME(pack_small),
    .unpack_small = NAME(unpack_small),
    .histogram = NAME(histogram),
    .literals = NAME(literals),
    .read_literals = NAME(read_literals),
    .to_bfloat16 = NAME(to_bfloat16),
    .to_float16 = NAME(to_float16),
    .fma_scalar = NAME(fma_scalar),
    .fma_array = NAME(fma_array),
    .moments = NAME(moments),
    .second_moment = NAME(second_moment),
    .move = NAME(move),
    .adam_differences = NAME(adam_differences),
    .adam_step = NAME(adam_step),
    .adam_replayed = NAME(adam_replayed),
    .buffered = NAME(buffered),
    .missed = NAME(missed),
    .mean_scales = NAME(mean_scales),
    .away = {GLUE(NAME(away), 16), GLUE(NAME(away), 32)},
    .back = {GLUE(NAME(back), 16), GLUE(NAME(back), 32)},
    .classes = NAME(classes),
    .changes = NAME(changes),
    .unsorted_changes = NAME(unsorted_changes),
    .scaled = NAME(scaled),
    .sum = NAME(sum),
    .four_sums = NAME(four_sums),
};

#undef WIDTHS
#undef STRING
#undef STRING_
#undef NAME
#undef TILE
