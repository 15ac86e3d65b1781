// Functions of lanes. The includer has the lanes of an instruction set.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace noria::NORIA_ISA {

// e^r - 1 = r + r^2 p(r) with the polynomial p of Cephes' expf, and 2^n, so that e^x = 2^n e^r.
struct Exponential {
  Lanes less_one, power;
};
// x: between -87 and 89, or NaN.
inline Exponential reduce_exp(Lanes x) {
  const Lanes n = round_even(mul(x, splat(1.44269504088896341f)));
  Lanes r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Lanes p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, splat(c));
  return {fma(mul(r, r), p, r), as_lanes(shift_left<23>(add_words(to_words(n), 127)))};
}

// e^x within 2 units in the last place, 1 for 0; infinite from 88.4 on, e^-87 below -87.
inline Lanes exp(Lanes x) {
  const Exponential e = reduce_exp(min(splat(89.0f), max(splat(-87.0f), x)));
  return mul(add(e.less_one, splat(1.0f)), e.power);
}

// As t / (t + 2), t = e^2x - 1, which is as exact for small x as for large ones.
inline Lanes tanh(Lanes x) {
  const Exponential e = reduce_exp(min(splat(40.0f), max(splat(-40.0f), add(x, x))));
  const Lanes t = fma(e.power, e.less_one, add(e.power, splat(-1.0f)));
  return div(t, add(t, splat(2.0f)));
}

}  // namespace noria::NORIA_ISA
