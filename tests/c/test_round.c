/*
 * test_round.c - conversions over all 16-bit patterns and against a float64 oracle; Philox against the
 * published vectors; the stochastic counts exactly.
 */
#include "dion3_round.h"
#include "expect.h"

typedef struct format {
    const char* name;
    float (*widen)(uint16_t);
    uint16_t (*nearest)(float);
    uint16_t (*stochastic)(float, uint32_t);
    uint16_t infinity;  /* bits of +Inf; one less is the largest finite value */
    int least_exponent; /* of the spacing: 2^least_exponent between subnormals */
    int digits;         /* significant bits */
} format;

static float bf16_widen(uint16_t h) { return d3_from_bf16(h); }
static float fp16_widen(uint16_t h) { return d3_from_fp16(h); }
static uint16_t bf16_nearest(float x) { return d3_to_bf16(x); }
static uint16_t fp16_nearest(float x) { return d3_to_fp16(x); }
static uint16_t bf16_stochastic(float x, uint32_t u) { return d3_to_bf16_stochastic(x, u); }
static uint16_t fp16_stochastic(float x, uint32_t u) { return d3_to_fp16_stochastic(x, u); }

static const format formats[] = {
    {"bf16", bf16_widen, bf16_nearest, bf16_stochastic, 0x7f80, -133, 8},
    {"fp16", fp16_widen, fp16_nearest, fp16_stochastic, 0x7c00, -24, 11},
};

/* The value of a pattern, from the definition of the format. */
static double value_of(const format* f, uint16_t h) {
    const int mantissa_bits = f->digits - 1;
    const int exponent = (h & 0x7fff) >> mantissa_bits;
    const int mantissa = h & ((1 << mantissa_bits) - 1);
    const double magnitude = exponent
                                 ? ldexp(mantissa + (1 << mantissa_bits), f->least_exponent + exponent - 1)
                                 : ldexp(mantissa, f->least_exponent);
    return h & 0x8000 ? -magnitude : magnitude;
}

/* |x| in units of the spacing there, for finite x. */
static double in_spacings(const format* f, float x, double* spacing) {
    int exponent;
    frexp((double)x, &exponent);
    exponent -= f->digits;
    if (x == 0.0f || exponent < f->least_exponent) exponent = f->least_exponent;
    *spacing = ldexp(1.0, exponent);
    return fabs((double)x) / *spacing;
}

static int is_nan_pattern(const format* f, uint16_t h) { return (h & 0x7fff) > f->infinity; }

static void test_patterns(const format* f) {
    for (uint32_t p = 0; p < 65536; ++p) {
        const uint16_t h = (uint16_t)p;
        const float x = f->widen(h);
        if (is_nan_pattern(f, h)) {
            EXPECT(x != x, "%s %04x widens to %g", f->name, p, (double)x);
            EXPECT(is_nan_pattern(f, f->nearest(x)) && (f->nearest(x) ^ h) < 0x8000, "%s %04x", f->name, p);
            EXPECT(is_nan_pattern(f, f->stochastic(x, 65535)), "%s %04x", f->name, p);
            continue;
        }
        if ((h & 0x7fff) == f->infinity) {
            EXPECT(isinf(x), "%s %04x", f->name, p);
        } else {
            EXPECT((double)x == value_of(f, h), "%s %04x widens to %a", f->name, p, (double)x);
        }
        EXPECT(f->nearest(x) == h, "%s %04x rounds to %04x", f->name, p, f->nearest(x));
        for (uint32_t u = 0; u < 65536; u += 4369) {
            EXPECT(f->stochastic(x, u) == h, "%s %04x with %u goes to %04x", f->name, p, u,
                   f->stochastic(x, u));
        }
    }
}

/* Both roundings of x against float64 arithmetic. */
static void check_value(const format* f, float x) {
    const double largest = value_of(f, (uint16_t)(f->infinity - 1));
    double spacing;
    const double count = in_spacings(f, x, &spacing);
    const double nearest = nearbyint(count) * spacing;
    const uint16_t h = f->nearest(x);
    const double got = fabs((double)f->widen(h));
    EXPECT(nearest > largest ? isinf(got) : got == nearest, "%s %a rounds to %a", f->name, (double)x, got);
    EXPECT((h >> 15) == (d3_bits(x) >> 31), "%s %a loses its sign", f->name, (double)x);
    for (uint32_t u = 0; u < 65536; u += 257) {
        const double sum = floor(count + u / 65536.0) * spacing;
        const double want = sum > largest ? largest : sum;
        const uint16_t s = f->stochastic(x, u);
        EXPECT(fabs((double)f->widen(s)) == want, "%s %a with %u goes to %a, not %a", f->name, (double)x, u,
               (double)f->widen(s), want);
        EXPECT((s >> 15) == (d3_bits(x) >> 31), "%s %a loses its sign", f->name, (double)x);
    }
}

static void test_values(const format* f) {
    uint32_t state = 1;
    for (uint32_t b = 0; b < 0x7f800000u; b += 65521) check_value(f, d3_float(b));
    for (int i = 0; i < 20000; ++i) {
        state = state * 1664525u + 1013904223u;
        if ((state & 0x7f800000u) != 0x7f800000u) check_value(f, d3_float(state));
    }
    /* Every neighbourhood of a representable value, and every midpoint, on both sides. */
    for (uint32_t h = 0; h + 1 < f->infinity; h += 7) {
        const double middle = 0.5 * (value_of(f, (uint16_t)h) + value_of(f, (uint16_t)(h + 1)));
        check_value(f, (float)middle);
        check_value(f, nextafterf((float)middle, INFINITY));
        check_value(f, nextafterf((float)middle, 0.0f));
        check_value(f, -nextafterf(f->widen((uint16_t)h), INFINITY));
    }
    check_value(f, 3.4028234663852886e38f);
    check_value(f, 65520.0f);
    check_value(f, 65519.996f);
}

/* Of the 65536 values of u exactly fraction * 65536 round up. */
static void test_counts(const format* f) {
    static const double fractions[] = {0.5, 0.25, 1.0 / 65536, 1.0 - 1.0 / 8192, 0.2998046875};
    static const uint16_t starts[] = {0, 1, 0x0080, 0x0400, 0x3c00, 0x7bfe};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; ++i) {
        for (size_t j = 0; j < sizeof fractions / sizeof *fractions; ++j) {
            double spacing;
            long up = 0;
            float x =
                (float)(value_of(f, starts[i]) +
                        fractions[j] * (value_of(f, (uint16_t)(starts[i] + 1)) - value_of(f, starts[i])));
            const double count = in_spacings(f, x, &spacing);
            for (uint32_t u = 0; u < 65536; ++u) up += f->stochastic(-x, u) != (starts[i] | 0x8000);
            EXPECT(up == (long)floor((count - floor(count)) * 65536), "%s %04x + %g: %ld of 65536", f->name,
                   starts[i], fractions[j], up);
        }
    }
}

static void test_philox(void) {
    /* Known-answer vectors of the Random123 distribution. */
    static const struct {
        d3_random counter;
        uint32_t key[2];
        d3_random answer;
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; ++i) {
        const d3_random r = d3_philox4x32(vectors[i].counter, vectors[i].key[0], vectors[i].key[1]);
        EXPECT(memcmp(&r, &vectors[i].answer, sizeof r) == 0, "vector %zu", i);
    }
    /* The contract's counter and key: the last vector again, through the index. */
    const int64_t index = (int64_t)(0x05a308d3243f6a88ull << 3) + 5;
    const d3_random c = {0x243f6a88, 0x05a308d3, 7, 9};
    const d3_random want = d3_philox4x32(c, 0xa4093822, 0x299f31d0);
    const d3_random block = d3_random_block(0x299f31d0a4093822ull, 7, 9, index & INT64_MAX);
    const uint32_t words[4] = {block.x, block.y, block.z, block.w};
    EXPECT(memcmp(&block, &want, sizeof want) == 0, "counter of a 64-bit index");
    for (uint32_t lane = 0; lane < 8; ++lane) {
        EXPECT(d3_random_piece(block, lane) == ((words[lane >> 1] >> (16 * (lane & 1))) & 0xffff), "lane %u",
               lane);
    }
}

int main(void) {
    for (size_t i = 0; i < 2; ++i) {
        test_patterns(&formats[i]);
        test_values(&formats[i]);
        test_counts(&formats[i]);
    }
    EXPECT(d3_to_bf16_stochastic(-INFINITY, 65535) == 0xff80, "-Inf stays");
    EXPECT(d3_to_fp16_stochastic(INFINITY, 65535) == 0x7c00, "Inf stays");
    EXPECT(d3_to_fp16_stochastic(70000.0f, 0) == 0x7bff, "saturates");
    EXPECT(d3_step_number(0.0f) == 0 && d3_step_number(-1.0f) == 0 && d3_step_number(16777216.0f) == 1u << 24,
           "step numbers");
    test_philox();
    return finish("round");
}
