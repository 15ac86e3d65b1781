// Gumbel noise as jax.random makes it: a pure function of key, position and token.
//
// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): Threefry-2x32 with 20 rounds.
#pragma once

#include <cmath>

#include "simd/loops.h"

namespace noria::NORIA_ISA {

// Two words of state; T is uint32_t or Words.
template <typename T>
struct Pair {
  T first, second;
};

inline uint32_t plus(uint32_t a, uint32_t b) { return a + b; }
inline uint32_t exclusive_or(uint32_t a, uint32_t b) { return a ^ b; }
template <int n>
inline uint32_t rotate(uint32_t a) {
  return a << n | a >> (32 - n);
}
inline Words plus(Words a, uint32_t b) { return add_words(a, b); }
inline Words plus(Words a, Words b) { return add_words(a, b); }
inline Words exclusive_or(Words a, Words b) { return bit_xor(a, b); }
template <int n>
inline Words rotate(Words a) {
  return bit_or(shift_left<n>(a), shift_right<32 - n>(a));
}

struct Key {
  uint32_t words[3];
  Key(uint32_t first, uint32_t second) : words{first, second, first ^ second ^ 0x1bd11bdau} {}
};

template <int a, int b, int c, int d, typename T>
inline NORIA_INLINE void four_rounds(Pair<T>& x) {
  const auto round = [&](auto n) NORIA_INLINE {
    x.first = plus(x.first, x.second);
    x.second = exclusive_or(rotate<n>(x.second), x.first);
  };
  round(std::integral_constant<int, a>{});
  round(std::integral_constant<int, b>{});
  round(std::integral_constant<int, c>{});
  round(std::integral_constant<int, d>{});
}

template <typename T>
inline NORIA_INLINE Pair<T> threefry(const Key& key, Pair<T> x) {
  x = {plus(x.first, key.words[0]), plus(x.second, key.words[1])};
  unroll<5>([&](auto i) NORIA_INLINE {
    if constexpr (i % 2 == 0)
      four_rounds<13, 15, 26, 6>(x);
    else
      four_rounds<17, 29, 16, 24>(x);
    x = {plus(x.first, key.words[(i + 1) % 3]), plus(x.second, key.words[(i + 2) % 3] + i + 1)};
  });
  return x;
}

// Of one row. Numbers of 23 bits: `draws` gives those of sixteen tokens, and `gumbel` what a number means.
class Noise {
 public:
  Noise(uint32_t high, uint32_t low, uint32_t position) : key_(folded(high, low, position)) {}

  Words draws(int64_t token) const {
    const Words each = add_words(load_words(kCount), static_cast<uint32_t>(token));
    const Pair<Words> x = threefry(key_, Pair<Words>{zero_words(), each});
    return shift_right<9>(bit_xor(x.first, x.second));
  }

  static float gumbel(uint32_t draw) {
    const float u = draw ? static_cast<float>(draw) * 0x1p-23f : 0x1p-126f;
    return -std::log(-std::log(u));
  }

 private:
  static Key folded(uint32_t high, uint32_t low, uint32_t position) {
    const Pair<uint32_t> x = threefry(Key(high, low), Pair<uint32_t>{0, position});
    return {x.first, x.second};
  }

  static constexpr uint32_t kCount[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Key key_;
};

constexpr float kMostNoise = 16.0f;  // more than gumbel(2^23 - 1), which is 15.94

// At least gumbel(draw), quickly: -log u >= 1 - u, so gumbel <= -log(1 - u), of which only the exponent is looked at.
inline Lanes bound(Words draws) {
  const Lanes left = add(mul(to_lanes(draws), splat(-1.0f)), splat(0x1p23f));  // (1 - u) 2^23: 1 to 2^23
  const Lanes exponent = to_lanes(shift_right<23>(as_words(left)));            // 127 to 150
  return fma(exponent, splat(-0.6931472f), splat(150.0f * 0.6931472f + 0.001f));
}

}  // namespace noria::NORIA_ISA
