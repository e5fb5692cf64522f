/*
 * rows.h - the arithmetic of one element and of one row, shared by host and device.
 *
 * The order of operations here is the contract of dion3.h: each fp32 operation is rounded once, none
 * is fused, so CPU, GPU and dion3/reference.py give the same bits. Scalars come from a row of hyper.
 */
#ifndef DION3_ROWS_H
#define DION3_ROWS_H

#include "dion3.h"
#include "host_device.h"

/* ---- momentum and gather ---------------------------------------------------------------------- */

/* m <- keep * m + gain * g */
D3_HD float d3_momentum(float keep, float m, float gain, float g) {
    return d3_add(d3_mul(keep, m), d3_mul(gain, g));
}

/* nu * m + (1 - nu) * sign(gain) * g, m after its rounding: the Newton-Schulz input with nesterov. */
D3_HD float d3_nesterov(float nu, float m, float gain, float g) {
    float signed_g = (d3_bits(gain) >> 31) ? -g : g;
    return d3_add(d3_mul(nu, m), d3_mul(d3_sub(1.0f, nu), signed_g));
}

/* (float)(1 / max(norm, eps)); 0 where that divides by 0, the largest float where it overflows. A NaN norm
 * gives NaN, so that a broken gradient shows in its own matrix. */
D3_HD float d3_norm_scale(double norm, float eps) {
    double divisor = norm < (double)eps ? (double)eps : norm;
    double scale;
    if (divisor == 0.0) return 0.0f;
    scale = 1.0 / divisor;
    return scale > 3.4028234663852886e38 ? 3.4028234663852886e38f : (float)scale;
}

/* ---- neuron norm ------------------------------------------------------------------------------ */

/* s: the mean square of a row, from its float64 sum of squares. */
D3_HD float d3_neuron_mean(double sum_of_squares, int64_t cols) {
    return (float)(sum_of_squares / (double)cols);
}

/* v <- beta2 * v + (1 - beta2) * s */
D3_HD float d3_neuron_second_moment(float beta2, float v, float s) {
    return d3_add(d3_mul(beta2, v), d3_mul(d3_sub(1.0f, beta2), s));
}

/* d = sqrt(v) + eps */
D3_HD float d3_neuron_divisor(float v, float eps) { return d3_add(d3_sqrt(v), eps); }

/* A row's term of sum (s / d^2); a row without an update has none, even where d is 0. */
D3_HD double d3_neuron_term(float s, float d) {
    return s == 0.0f ? 0.0 : (double)s / ((double)d * (double)d);
}

/* sqrt(total / scaled) / d with total = sum s and scaled = sum (s / d^2) over the rows of the matrix.
 * 1 where there is nothing to scale: no update in the whole matrix, or none ever in this row and eps 0. */
D3_HD float d3_neuron_factor(double total, double scaled, float d) {
    if (total == 0.0 || d == 0.0f) return 1.0f;
    return d3_div((float)sqrt(total / scaled), d);
}

/* ---- update ----------------------------------------------------------------------------------- */

/* g = (b * scale) * factor; factor 1 where there is no neuron norm. */
D3_HD float d3_update_gain(float step, float scale, float factor) {
    return d3_mul(d3_mul(step, scale), factor);
}

/* a * w, of a slice that is not selected */
D3_HD float d3_decay(float decay, float w) { return d3_mul(decay, w); }

/* a * w - g * o, of a selected one */
D3_HD float d3_update(float decay, float w, float gain, float o) {
    return d3_sub(d3_mul(decay, w), d3_mul(gain, o));
}

/* ---- adamw ------------------------------------------------------------------------------------ */

typedef struct d3_adamw {
    float decay, beta1, beta1_complement, beta2, beta2_complement, eps, sign;
    float step_size; /* lr / (1 - beta1^t) */
    float root;      /* sqrt(1 - beta2^t) */
} d3_adamw;

/* base^n by squaring: multiplications only, so host and device give the same bits. */
D3_HD double d3_power(double base, uint32_t n) {
    double result = 1.0;
    while (n) {
        if (n & 1u) result *= base;
        base *= base;
        n >>= 1;
    }
    return result;
}

/* The scalars of an AdamW step from a row of hyper and the step's number (1 at the first step). The powers
 * are those of 1 - complement in float64: beta itself, rounded to fp32, would leave only four digits
 * of 1 - 0.999. */
D3_HD d3_adamw d3_adamw_scalars(const float* hyper, float step) {
    d3_adamw s;
    uint32_t t = step > 1.0f ? (uint32_t)step : 1u;
    s.decay = hyper[DION3_ADAMW_DECAY];
    s.beta1 = hyper[DION3_ADAMW_BETA1];
    s.beta1_complement = hyper[DION3_ADAMW_BETA1_COMPLEMENT];
    s.beta2 = hyper[DION3_ADAMW_BETA2];
    s.beta2_complement = hyper[DION3_ADAMW_BETA2_COMPLEMENT];
    s.eps = hyper[DION3_ADAMW_EPS];
    s.sign = hyper[DION3_ADAMW_SIGN];
    s.step_size =
        (float)((double)hyper[DION3_ADAMW_STEP] / (1.0 - d3_power(1.0 - (double)s.beta1_complement, t)));
    s.root = (float)sqrt(1.0 - d3_power(1.0 - (double)s.beta2_complement, t));
    return s;
}

/* One element: the new, unrounded moments. */
D3_HD void d3_adamw_moments(const d3_adamw* s, float grad, float* m, float* v) {
    float g = d3_mul(s->sign, grad);
    *m = d3_add(d3_mul(s->beta1, *m), d3_mul(s->beta1_complement, g));
    *v = d3_add(d3_mul(s->beta2, *v), d3_mul(s->beta2_complement, d3_mul(g, g)));
}

/* The direction of the step, m / (sqrt(v) / root + eps), and the new weight. */
D3_HD float d3_adamw_direction(const d3_adamw* s, float m, float v) {
    return d3_div(m, d3_add(d3_div(d3_sqrt(v), s->root), s->eps));
}

D3_HD float d3_adamw_weight(const d3_adamw* s, float w, float direction) {
    return d3_sub(d3_mul(s->decay, w), d3_mul(s->step_size, direction));
}

#endif
