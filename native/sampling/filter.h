// What top-k and top-p leave: a threshold for the scaled logits.
#pragma once

#include <algorithm>
#include <cmath>

#include "runtime/scratch.h"
#include "runtime/types.h"
#include "simd/math.h"

namespace noria::NORIA_ISA {

// A sum of weights between 0 and 1, each cut into three integers of 13 bits, so that the order of the sum is free.
struct Sum {
  uint64_t parts[3] = {0, 0, 0};
  void add(const Sum& other) {
    for (int i = 0; i < 3; ++i) parts[i] += other.parts[i];
  }
  float value() const {
    float value = 0;
    for (int i = 2; i >= 0; --i) value = (value + static_cast<float>(parts[i])) * 0x1p-13f;
    return value;
  }
};

// Sums of the digits of up to 2^19 weights, lane by lane.
struct Sums {
  Words parts[3] = {zero_words(), zero_words(), zero_words()};
  template <typename Digits>
  void add(const Digits& digits) {
    for (int i = 0; i < 3; ++i) parts[i] = add_words(parts[i], digits.parts[i]);
  }
  Sum total() const {
    Sum total;
    alignas(64) uint32_t each[kLanes];
    for (int i = 0; i < 3; ++i) {
      store_words(each, parts[i]);
      for (const uint32_t part : each) total.parts[i] += part;
    }
    return total;
  }
};
constexpr float kWeightless = -28;  // e^-28 < 2^-39

// The digits of sixteen weights.
struct Digits {
  Words parts[3];
  explicit Digits(Lanes weight) {
    for (Words& part : parts) {
      weight = mul(weight, splat(0x1p13f));
      // Rounded down, or an odd integer to the one before, whose rest is then 1: that is as good.
      const Lanes whole = round_even(add(weight, splat(-0.5f)));
      part = to_words(whole);
      weight = add(weight, mul(whole, splat(-1.0f)));
    }
  }
};

struct Candidate {
  float logit;         // scaled
  uint16_t digits[3];  // of its weight, e^logit
  Sum sum() const {
    Sum sum;
    for (int i = 0; i < 3; ++i) sum.parts[i] = digits[i];
    return sum;
  }
};

// The largest logit such that the weights of all candidates from there up are `enough`, which all together must be.
template <typename Enough>
float threshold(Candidate* first, Candidate* last, const Enough& enough) {
  Sum above;
  while (true) {
    const float a = first->logit, b = first[(last - first) / 2].logit, c = last[-1].logit;
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    Candidate* equal = std::partition(first, last, [&](const Candidate& each) { return each.logit > pivot; });
    Candidate* less = std::partition(equal, last, [&](const Candidate& each) { return each.logit == pivot; });
    Sum with_greater = above;
    for (const Candidate* each = first; each < equal; ++each) with_greater.add(each->sum());
    if (equal > first && enough(with_greater)) {
      last = equal;
      continue;
    }
    for (const Candidate* each = equal; each < less; ++each) with_greater.add(each->sum());
    if (less == last || enough(with_greater)) return pivot;
    above = with_greater;
    first = less;
  }
}

// The scaled logits of a row, sixteen at a time; minus infinity behind the last.
struct Scaled {
  const float* logits;
  int64_t vocab;
  float largest, temperature;
  Lanes at(int64_t token) const {
    if (token + kLanes <= vocab) return scale(load(logits + token));
    alignas(64) float some[kLanes];
    for (int i = 0; i < kLanes; ++i) some[i] = token + i < vocab ? logits[token + i] : -INFINITY;
    return scale(load(some));
  }

 private:
  Lanes scale(Lanes x) const { return div(add(x, splat(-largest)), splat(temperature)); }
};

class Filter {
 public:
  Filter(const Scaled& scaled, int32_t top_k, float top_p) : scaled_(scaled), top_p_(top_p) {
    k_ = top_k > 0 && top_k < scaled.vocab ? top_k : 0;
  }

  // The smallest logit that stays.
  float floor() {
    if (k_ == 0 && top_p_ >= 1) return -INFINITY;
    float floor = -INFINITY;
    // Only what is likely is looked at closely, and more only if that is not enough.
    for (float cut = -8; !find(cut, &floor); cut *= 4) {
    }
    return std::min(floor, 0.0f);  // the largest stays, even for a top_p that underflows
  }

 private:
  bool find(float cut, float* floor) {
    const bool all = cut < -100;  // what weighs nothing is not worth another pass
    const Sum total = collect(all ? -INFINITY : cut);
    Candidate* last = candidates_ + count_;
    if (k_ > 0) {
      if (count_ < k_ && !all) return false;
      if (count_ >= k_) {
        std::nth_element(candidates_, candidates_ + k_ - 1, last,
                         [](const Candidate& a, const Candidate& b) { return a.logit > b.logit; });
        *floor = candidates_[k_ - 1].logit;
        last = std::partition(candidates_, last, [&](const Candidate& each) { return each.logit >= *floor; });
      }
    }
    if (top_p_ >= 1) return true;
    Sum here;
    for (const Candidate* each = candidates_; each < last; ++each) here.add(each->sum());
    const float nucleus = top_p_ * (k_ > 0 ? here : total).value();
    const auto enough = [&](const Sum& sum) { return sum.value() >= nucleus; };
    if (!enough(here) && !all) return false;
    *floor = threshold(candidates_, last, enough);
    return true;
  }

  // Those from `cut` up; returns the weight of the whole row.
  Sum collect(float cut) {
    candidates_ = scratch<Candidate, 0>(scaled_.vocab + kLanes);
    count_ = 0;
    Sums sums;
    for (int64_t token = 0; token < scaled_.vocab; token += kLanes) {
      const Lanes logits = scaled_.at(token);
      const float likeliest = max_of(logits);
      if (likeliest < kWeightless) {
        if (likeliest >= cut) append(logits, nullptr, cut, token);
        continue;
      }
      const Digits digits(exp(logits));
      sums.add(digits);
      if (likeliest >= cut) append(logits, &digits, cut, token);
    }
    return sums.total();
  }

  void append(Lanes logits, const Digits* digits, float cut, int64_t token) {
    alignas(64) float values[kLanes];
    alignas(64) uint32_t parts[3][kLanes] = {};
    store(values, logits);
    for (int i = 0; digits && i < 3; ++i) store_words(parts[i], digits->parts[i]);
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, scaled_.vocab - token));
    for (int lane = 0; lane < lanes; ++lane) {
      if (values[lane] < cut) continue;
      Candidate& candidate = candidates_[count_++];
      candidate.logit = values[lane];
      for (int i = 0; i < 3; ++i) candidate.digits[i] = static_cast<uint16_t>(parts[i][lane]);
    }
  }

  const Scaled scaled_;
  const float top_p_;
  int64_t k_;
  Candidate* candidates_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace noria::NORIA_ISA
