// The XLA custom calls noria_sample, one token for each row of logits, and noria_score, what they say of a token.
#include "runtime/operands.h"
#include "runtime/parallel.h"
#include "sampling/types.h"

namespace noria::sampling {
namespace {

template <typename T>
const T* vector(ffi::AnyBuffer buffer, ffi::DataType type, int64_t count, const char* message) {
  require(buffer.element_type() == type && static_cast<int64_t>(buffer.element_count()) == count, message);
  return static_cast<const T*>(buffer.untyped_data());
}

// floats: temperature, top_p, min_p. words: top_k, the key's high and low half, position.
ffi::Error sample(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer floats, ffi::AnyBuffer words,
                  ffi::AnyBuffer banned, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> tokens, int64_t num_tokens,
                  std::string_view path, int64_t threads) {
  return guarded([&] {
    const auto shape = logits.dimensions();
    require(logits.element_type() == ffi::DataType::F32 && shape.size() == 2, "logits must be float32 [rows, vocabulary]");
    const int64_t all = shape[0], vocab = shape[1];
    require(num_tokens >= 1 && num_tokens <= vocab, "the logits do not hold so many tokens");
    const auto* values = static_cast<const float*>(logits.untyped_data());
    const auto* settings = vector<float>(floats, ffi::DataType::F32, 3 * all, "settings must be float32 [3, rows]");
    const auto* numbers = vector<int32_t>(words, ffi::DataType::S32, 4 * all, "settings must be int32 [4, rows]");
    const auto width = static_cast<int64_t>(all ? banned.element_count() / all : 0);
    const auto* bans = vector<int32_t>(banned, ffi::DataType::S32, all * width, "bans must be int32 [rows, bans]");
    const int64_t count = std::clamp<int64_t>(
        *vector<int32_t>(rows, ffi::DataType::S32, 1, "the number of rows must be int32"), 0, all);
    require(tokens->element_type() == ffi::DataType::S32 && static_cast<int64_t>(tokens->element_count()) == all,
            "tokens must be int32 [rows]");
    auto* chosen = static_cast<int32_t*>(tokens->untyped_data());
    const Kernels& kernels = *path_of(path).sampling;
    parallel(pool, count, pool_threads(pool, threads), 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const auto word = [&](int64_t i) { return static_cast<uint32_t>(numbers[i * all + row]); };
        const int32_t* begin = bans + row * width;
        const auto used = [&](int32_t token) { return token >= 0 && token < num_tokens; };
        const bool any = std::any_of(begin, begin + width, used);
        chosen[row] = kernels.choose({values + row * vocab, num_tokens, begin, any ? width : 0, settings[row],
                                      settings[all + row], settings[2 * all + row], numbers[row], word(1), word(2),
                                      word(3)});
      }
    });
    std::fill(chosen + count, chosen + all, 0);
  });
}

ffi::Error score(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer token_ids, ffi::AnyBuffer rows,
                 ffi::Result<ffi::AnyBuffer> scores, std::string_view path, int64_t threads) {
  return guarded([&] {
    const auto shape = logits.dimensions(), columns = scores->dimensions();
    require(logits.element_type() == ffi::DataType::F32 && shape.size() == 2 && shape[1] > 0,
            "logits must be float32 [rows, vocabulary]");
    const int64_t all = shape[0], vocab = shape[1];
    require(scores->element_type() == ffi::DataType::S32 && columns.size() == 2 && columns[0] == all &&
                columns[1] >= 3 && columns[1] % 2 == 1,
            "scores must be int32 [rows, 3 + 2 * tokens]");
    const int64_t width = columns[1], num_top = (width - 3) / 2;
    const auto* values = static_cast<const float*>(logits.untyped_data());
    const auto* ids = vector<int32_t>(token_ids, ffi::DataType::S32, all, "token ids must be int32 [rows]");
    const int64_t count = std::clamp<int64_t>(
        *vector<int32_t>(rows, ffi::DataType::S32, 1, "the number of rows must be int32"), 0, all);
    auto* out = static_cast<int32_t*>(scores->untyped_data());
    const Kernels& kernels = *path_of(path).sampling;
    parallel(pool, count, pool_threads(pool, threads), 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        int32_t* line = out + row * width;
        float* tops = scratch<float, 8>(num_top + 1);
        const Score score = kernels.score(values + row * vocab, vocab, ids[row], num_top, line + 3, tops);
        line[0] = score.rank;
        std::memcpy(line + 1, &score.logit, sizeof(float));
        std::memcpy(line + 2, &score.sum, sizeof(float));
        std::memcpy(line + 3 + num_top, tops, num_top * sizeof(float));
      }
    });
    std::fill(out + count * width, out + all * width, 0);
  });
}

}  // namespace
}  // namespace noria::sampling

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(noria_sample, noria::sampling::sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("num_tokens")
                                  .Attr<std::string_view>("path")
                                  .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(noria_score, noria::sampling::score,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("path")
                                  .Attr<int64_t>("threads"));
#pragma GCC visibility pop
