/* Types and the table of loops. Every loop works on little-endian memory at any address. */
#ifndef CKPTSTORE_CORE_H
#define CKPTSTORE_CORE_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the loops work on little-endian words only; without them numpy does the work"
#endif

#if !defined(FLT_EVAL_METHOD) || FLT_EVAL_METHOD != 0
#error "fp32 operations are rounded more than once here (x87); without the loops numpy does the work"
#endif

/* Arrays need no alignment, and one array is read with several types. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef uint8_t u8;
typedef uint16_t ANYWHERE u16;
typedef uint32_t ANYWHERE u32;
typedef uint64_t ANYWHERE u64;
typedef int64_t ANYWHERE i64;
typedef float ANYWHERE f32;

#define PASTE_(a, b, c) a##_##b##_##c
#define PASTE(a, b, c) PASTE_(a, b, c)
#define GLUE_(a, b) a##b
#define GLUE(a, b) GLUE_(a, b)
#define INLINE static inline __attribute__((always_inline))

/* Before a loop: no element depends on another one, even if an array is written in place. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety) interleave(enable)")
#else
#define EACH _Pragma("GCC ivdep")
#endif

enum how { PUT, UNZIGZAG, ROTATE, ADD, XOR };
enum variant { FMA, PLAIN, DIVIDE };

/* A plane: the same `size` bytes of every word. */
struct plane {
    void *at;
    size_t size;
};

/* The numbers of a step of Adam without amsgrad (formats/optim/adam.py). */
struct adam {
    int divide;
    double inverse, weight2;
    float beta2, shrink, root, eps, rate;
    int variant, near, maximize; /* of a step with a gradient, as the following */
    float share, scale[4];
    size_t scales;
};

/* An array of functions has one for words of 1, 2, 4 and 8 bytes each. */
struct loops {
    const char *name;
    void (*difference[4])(const void *new, const void *base, void *out, size_t count);
    void (*zigzag[4])(const void *values, void *out, size_t count);
    void (*rotate_left[4])(const void *values, void *out, size_t count);
    void (*split[4])(const void *words, const struct plane *planes, size_t number, size_t count);
    void (*combine[4])(const struct plane *planes, size_t number, int how, const void *base, void *out, size_t count);
    size_t (*find[4])(const void *values, uint64_t limit, u32 *where, size_t count);
    int64_t (*take[4])(const void *values, uint64_t limit, const u32 *where, size_t found, u8 *rest, u8 *steps,
                       size_t most, void *greater, size_t count);
    int (*exceptions[4])(const void *values, uint64_t limit, u8 *rest, u8 *steps, size_t *step_count, void *greater,
                         size_t *found, size_t most, size_t count);
    int (*put[4])(const u8 *steps, size_t number, const void *greater, size_t found, uint64_t limit, void *out,
                  size_t count);
    void (*place[4])(const u32 *where, const void *greater, uint64_t limit, size_t start, void *out, size_t count);
    void (*classify[4])(const void *base, int shift, uint64_t low, uint64_t high, u8 *labels, size_t count);
    int (*sort[4])(const void *words, const u8 *labels, uint64_t (*places)[256], void *out, size_t count);
    int (*add_unsorted[4])(const void *words, const u8 *labels, uint64_t (*places)[256], const void *base, void *out,
                           size_t count);
    void (*pack_small)(const u8 *values, int bits, u8 *out, size_t count);
    void (*unpack_small)(const u8 *packed, int bits, u8 *out, size_t count);
    void (*histogram)(const u8 *values, size_t count, uint32_t *counts);
    size_t (*literals)(const u8 *values, size_t count, u8 *out, size_t most);
    int (*read_literals)(const u8 *in, size_t size, u8 *out, size_t count);
    void (*to_bfloat16)(const u32 *values, u16 *out, size_t count);
    void (*to_float16)(const u32 *values, u16 *out, size_t count);
    void (*fma_scalar)(const f32 *a, float b, const f32 *c, f32 *out, size_t count);
    void (*fma_array)(const f32 *a, const f32 *b, const f32 *c, f32 *out, size_t count);
    void (*moments)(int variant, int near, f32 *first, f32 *second, const f32 *gradient, float share, float keep,
                    float weight2, size_t count);
    void (*second_moment)(const f32 *first, const f32 *before, const f32 *second, double inverse, float keep,
                          double weight2, f32 *out, size_t count);
    void (*move)(int divide, f32 *weight, const f32 *first, const f32 *second, float shrink, float root, float eps,
                 float rate, size_t count);
    void (*adam_differences)(const struct adam *rule, const f32 *const *old, const f32 *const *new, u32 *const *out,
                             size_t (*missed)[2], size_t head, size_t count);
    void (*adam_step)(const struct adam *rule, size_t item, const void *gradient, f32 *weight, f32 *first, f32 *second,
                      size_t count);
    void (*adam_replayed)(const struct adam *rule, size_t item, const u8 *gradient, const f32 *const *old,
                          const f32 *const *new, u32 *const *out, size_t (*missed)[2], size_t head, size_t count);
    void (*buffered)(int plain, int nesterov, f32 *weight, f32 *buffer, const f32 *gradient, float momentum,
                     float share, float rate, size_t count);
    size_t (*missed)(const u32 *values, const u32 *predicted, size_t count);
    void (*mean_scales)(const u32 *values, const u32 *second, int32_t centre, u8 *out, size_t count);
    void (*away[2])(const void *values, const u32 *second, const u8 *scales, void *out, size_t count); /* 16, 32 bits */
    void (*back[2])(const void *words, const u32 *second, const u8 *scales, void *out, size_t count);
    void (*classes)(const u32 *base, const u32 *second, const u8 *scales, u8 *labels, size_t count);
    void (*changes)(const u32 *new, const u32 *base, u32 *out, size_t count);
    int (*unsorted_changes)(const u32 *words, const u8 *labels, uint64_t (*places)[256], const u32 *base, u32 *out,
                            size_t count);
    void (*scaled)(const f32 *values, float factor, f32 *out, size_t count);
    uint64_t (*sum)(const u32 *words, const u64 *weights, size_t count);
    void (*four_sums)(const u32 *words, size_t stride, const u64 *weights, size_t count, u64 *sums);
};

#endif
