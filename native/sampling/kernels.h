// One row: from its logits to its token.
//
// Included once for each instruction set, by a file that defines NORIA_ISA and includes the lanes for it.
#pragma once

#include <cstring>

#include "sampling/filter.h"
#include "sampling/noise.h"
#include "sampling/types.h"

namespace noria::NORIA_ISA {

struct Logit {  // a type of this namespace, for memory that no other instruction set shares
  float value;
};

// The largest logit; NaN where one is no number or infinite.
inline float largest_of(const float* logits, int64_t vocab) {
  Lanes largest = splat(-INFINITY), wrong = zero();
  float last = -INFINITY;
  int64_t token = 0;
  for (; token + kLanes <= vocab; token += kLanes) {
    const Lanes x = load(logits + token);
    largest = max(x, largest);
    wrong = fma(max(splat(-1.0f), x), zero(), wrong);  // max() takes the second when it is NaN; 0 times infinity is NaN, too
  }
  bool good = true;
  for (; token < vocab; ++token) {
    good = good && logits[token] < INFINITY;
    last = logits[token] > last ? logits[token] : last;
  }
  alignas(64) float each[kLanes];
  store(each, wrong);
  for (const float one : each) good = good && one == 0;
  const float most = max_of(largest);
  return !good ? NAN : most > last ? most : last;
}

inline int32_t first_equal(const float* logits, float value) {
  int32_t token = 0;
  while (logits[token] != value) ++token;
  return token;
}

// The token whose logit and noise together are the most: a draw from the softmax of those from `floor` up (the
// Gumbel-max trick). Noise is made only where it could make a difference.
inline int32_t draw(const Scaled& scaled, float floor, const Noise& noise, int32_t likeliest) {
  int32_t best = likeliest;
  alignas(64) uint32_t draws[kLanes];
  store_words(draws, noise.draws(likeliest));
  float most = Noise::gumbel(draws[0]);  // its own logit is 0
  constexpr int kTogether = 4 * kLanes;
  for (int64_t block = 0; block < scaled.vocab; block += kTogether) {
    Lanes logits[4];
    for (int i = 0; i < 4; ++i) logits[i] = scaled.at(block + i * kLanes);
    const float top = max_of(max(max(logits[0], logits[1]), max(logits[2], logits[3])));
    if (top + kMostNoise < most || top < floor) continue;
    for (int i = 0; i < 4; ++i) {
      const int64_t token = block + i * kLanes;
      const Words numbers = noise.draws(token);
      const Lanes reach = add(logits[i], bound(numbers));
      if (max_of(reach) < most) continue;
      alignas(64) float values[kLanes], reaches[kLanes];
      store(values, logits[i]);
      store(reaches, reach);
      store_words(draws, numbers);
      for (int lane = 0; lane < kLanes && token + lane < scaled.vocab; ++lane) {
        if (reaches[lane] < most || values[lane] < floor) continue;
        const float sum = values[lane] + Noise::gumbel(draws[lane]);
        const auto id = static_cast<int32_t>(token + lane);
        if (sum > most || (sum == most && id < best)) most = sum, best = id;
      }
    }
  }
  return best;
}

int32_t choose(const sampling::Row& row) {
  const float* logits = row.logits;
  if (row.num_banned > 0) {
    float* allowed = &scratch<Logit, 0>(row.vocab)->value;
    std::memcpy(allowed, logits, row.vocab * sizeof(float));
    for (int64_t i = 0; i < row.num_banned; ++i)
      if (row.banned[i] >= 0 && row.banned[i] < row.vocab) allowed[row.banned[i]] = -INFINITY;
    logits = allowed;
  }
  const float largest = largest_of(logits, row.vocab);
  if (!(largest > -INFINITY)) return largest == -INFINITY ? sampling::kNothingAllowed : sampling::kNotANumber;
  const int32_t likeliest = first_equal(logits, largest);
  if (!(row.temperature > 0)) return likeliest;
  const Scaled scaled{logits, row.vocab, largest, row.temperature};
  float floor = Filter(scaled, row.top_k, row.top_p).floor();
  if (row.min_p > 0) floor = std::max(floor, std::min(std::log(row.min_p), 0.0f));
  return draw(scaled, floor, Noise(row.key_high, row.key_low, row.position), likeliest);
}

// The likeliest tokens, the first of equals before the others.
class Likeliest {
 public:
  Likeliest(int64_t count, int32_t* ids, float* values) : count_(count), ids_(ids), values_(values) {
    std::fill(ids, ids + count, 0);
    std::fill(values, values + count, -INFINITY);
  }
  float least() const { return count_ ? values_[count_ - 1] : INFINITY; }  // more than this belongs to them
  void insert(int32_t id, float value) {
    int64_t place = count_ - 1;
    for (; place > 0 && values_[place - 1] < value; --place) values_[place] = values_[place - 1], ids_[place] = ids_[place - 1];
    values_[place] = value, ids_[place] = id;
  }

 private:
  const int64_t count_;
  int32_t* const ids_;
  float* const values_;
};

sampling::Score score(const float* logits, int64_t vocab, int32_t token, int64_t num_top, int32_t* ids, float* values) {
  Likeliest likeliest(num_top, ids, values);
  const float largest = largest_of(logits, vocab);
  if (!(largest > -INFINITY)) {  // nothing can be said
    std::fill(values, values + num_top, NAN);
    return {1, NAN, NAN};
  }
  const Scaled scaled{logits, vocab, largest, 1.0f};
  const float chosen = logits[token >= 0 && token < vocab ? token : 0] - largest;
  int32_t rank = 1;
  Sums sums;
  alignas(64) float each[kLanes];
  for (int64_t at = 0; at < vocab; at += kLanes) {
    const Lanes x = scaled.at(at);
    const float top = max_of(x);
    if (top >= kWeightless) sums.add(Digits(exp(x)));
    if (top <= chosen && top <= likeliest.least()) continue;
    store(each, x);
    for (int lane = 0; lane < kLanes; ++lane) {
      rank += each[lane] > chosen;
      if (each[lane] > likeliest.least()) likeliest.insert(static_cast<int32_t>(at + lane), each[lane]);
    }
  }
  return {rank, chosen, sums.total().value()};
}

}  // namespace noria::NORIA_ISA
