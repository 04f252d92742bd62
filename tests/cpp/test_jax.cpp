// Calls as XLA makes them, from a run-time that consists of futures alone.
#include <array>
#include <condition_variable>

#include "engines.h"
#include "jax/completion_executor.h"
#include "jax/handlers.h"
#include "named/named.h"

using namespace farandole;
using testing::patience;

// XLA's side: what it knows of errors and futures.
struct farandole::ffi::Error {
  std::string text;
};
struct farandole::ffi::Future {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::string error;

  std::string wait() {
    std::unique_lock lock(mutex);
    if (!changed.wait_until(lock, patience().at, [this] { return done; }))
      testing::fail(__FILE__, __LINE__, "a future is not completed");
    return error;
  }
  void complete(const std::string& text) {
    const std::lock_guard lock(mutex);
    done = true;
    error = text;
    changed.notify_all();
  }
};

namespace {

const ffi::Api kApi{
    .struct_size = sizeof(ffi::Api),
    .extensions = nullptr,
    .version = {},
    .internal = nullptr,
    .error_create = [](ffi::ErrorCreate* a) { return new ffi::Error{a->message}; },
    .error_get_message = nullptr,
    .error_destroy = [](ffi::ErrorDestroy* a) { delete a->error; },
    .handler_register = nullptr,
    .stream_get = nullptr,
    .others = {},
    .future_create = [](ffi::FutureCreate* a) -> ffi::Error* {
      a->future = new ffi::Future;
      return nullptr;
    },
    .future_set_available = [](ffi::FutureSetAvailable* a) -> ffi::Error* {
      a->future->complete("");
      return nullptr;
    },
    .future_set_error = [](ffi::FutureSetError* a) -> ffi::Error* {
      a->future->complete(a->error->text);
      delete a->error;
      return nullptr;
    },
};

/// An all-reduce of some arrays in place, and the frame that says so.
class Frame {
 public:
  Frame(std::vector<std::vector<int32_t>>& arrays, uint32_t position, int size,
        std::string_view label, std::string_view ranks = "")
      : token_(position), size_(size), label_(label), ranks_(ranks) {
    for (auto& array : arrays) add(array.data(), static_cast<int64_t>(array.size()), 4);
    add(&token_, 1, 8);
    for (ffi::Buffer& buffer : buffers_) values_.push_back(&buffer);
    const ffi::Values values{sizeof(ffi::Values), nullptr, static_cast<int64_t>(values_.size()),
                             types_.data(), values_.data()};
    frame_.struct_size = sizeof frame_;
    frame_.api = &kApi;
    frame_.stage = ffi::Stage::execute;
    frame_.arguments = frame_.results = values;
    frame_.attributes = {sizeof(ffi::Attributes), nullptr,       8,
                         attribute_types_.data(), names_.data(), attributes_.data()};
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  /// How the call ended.
  std::string run() {
    if (ffi::Error* error = jax_collective(&frame_); error != nullptr) {
      const std::string text = error->text;
      delete error;
      return text;
    }
    if (frame_.future == nullptr) return "";
    const std::string text = frame_.future->wait();
    delete frame_.future;
    return text;
  }
  ffi::CallFrame& raw() { return frame_; }
  uint32_t token() const { return token_; }

 private:
  void add(void* data, int64_t count, ffi::ElementType type) {
    dims_.push_back(std::make_unique<int64_t>(count));
    buffers_.push_back({sizeof(ffi::Buffer), nullptr, type, data, 1, dims_.back().get()});
    types_.push_back(ffi::ValueType::buffer);
  }

  uint32_t token_;
  int64_t root_ = 0, size_;
  double one_ = 1;
  std::string label_, ranks_;
  ffi::Text kind_{"all_reduce", 10}, op_{"sum", 3}, text_{label_.data(), label_.size()},
      members_{ranks_.data(), ranks_.size()};
  ffi::Scalar factor_{12, &one_}, whole_root_{5, &root_}, whole_size_{5, &size_};
  std::array<ffi::Text, 8> texts_{{{"kind", 4},
                                   {"label", 5},
                                   {"op", 2},
                                   {"postscale", 9},
                                   {"prescale", 8},
                                   {"ranks", 5},
                                   {"root", 4},
                                   {"size", 4}}};
  std::array<ffi::Text*, 8> names_{&texts_[0], &texts_[1], &texts_[2], &texts_[3],
                                   &texts_[4], &texts_[5], &texts_[6], &texts_[7]};
  std::array<void*, 8> attributes_{&kind_,   &text_,    &op_,         &factor_,
                                   &factor_, &members_, &whole_root_, &whole_size_};
  std::array<ffi::AttributeType, 8> attribute_types_{
      ffi::AttributeType::string, ffi::AttributeType::string, ffi::AttributeType::string,
      ffi::AttributeType::scalar, ffi::AttributeType::scalar, ffi::AttributeType::string,
      ffi::AttributeType::scalar, ffi::AttributeType::scalar};
  std::vector<std::unique_ptr<int64_t>> dims_;
  std::vector<ffi::Buffer> buffers_;
  std::vector<ffi::ValueType> types_;
  std::vector<void*> values_;
  ffi::CallFrame frame_{};
};

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

void pass_barrier_by_name(Named& named) {
  NamedCall call{{Collective::all_reduce}};
  call.kind = Collective::barrier;
  call.name = "between";
  NamedRequest* const request = named.submit(call);
  CHECK(named.wait(*request, patience()));
  CHECK(!request->error);
  named.release(request);
}

/// A world of this one rank, whose calls the handler takes.
template <typename Body>
void alone(Body body) {
  testing::run_groups(1, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    set_jax_channel(std::make_shared<JaxChannel>(group));
    body();
    set_jax_channel(nullptr);
  });
}

}  // namespace

TEST(couriers_run_errands_while_others_are_away) {
  std::mutex mutex;
  std::condition_variable changed;
  int back = 0;
  // Each errand waits for the next one: nobody returns before all are away.
  for (int i = 0; i < 5; ++i)
    CompletionExecutor::all().send([&, i] {
      std::unique_lock lock(mutex);
      if (!changed.wait_until(lock, patience().at, [&] { return i == 4 || back == 4 - i; }))
        testing::fail(__FILE__, __LINE__, "an errand waits for one that nobody runs");
      ++back;
      changed.notify_all();
    });
  std::unique_lock lock(mutex);
  CHECK(changed.wait_until(lock, patience().at, [&] { return back == 5; }));
}

TEST(a_handler_introduces_itself) {
  ffi::Metadata about{};
  ffi::MetadataExtension extension{
      {sizeof(ffi::MetadataExtension), ffi::ExtensionType::metadata, nullptr}, &about};
  ffi::CallFrame frame{};
  frame.extensions = &extension.base;
  CHECK(jax_collective(&frame) == nullptr);
  CHECK_EQUAL(about.version.major, 0);
  CHECK_EQUAL(about.version.minor, 1);
}

TEST(calls_are_counted_and_refused_out_of_order) {
  std::vector<std::vector<int32_t>> arrays{{1, 2}, {3}};
  Frame nowhere(arrays, 0, 1, "x");
  CHECK(contains(nowhere.run(), "NotInitialized"));
  alone([&] {
    Frame first(arrays, 41, 1, "x"), second(arrays, 42, 1, "x"), again(arrays, 42, 1, "late");
    CHECK_EQUAL(first.run(), "");
    CHECK_EQUAL(first.token(), 42U);
    CHECK_EQUAL(second.run(), "");
    const std::string error = again.run();
    CHECK(contains(error, "'late' on rank 0 is out of order"));
    CHECK(contains(error, "comes as call 42, and 43 is next"));
    CHECK(contains(Frame(arrays, 43, 1, "x").run(), "out of order"));  // the world has failed
  });
  alone([&] {
    CHECK(contains(Frame(arrays, 0, 2, "x").run(), "made for 2 ranks, and runs on 1"));
    Frame strange(arrays, 0, 1, "x");
    static_cast<ffi::Buffer*>(strange.raw().arguments.values[0])->dtype = 15;  // complex64
    CHECK(contains(strange.run(), "element type 15"));
  });
}

TEST(process_sets_have_streams_of_their_own_and_one_order) {
  testing::run_groups(3, ProgressMode::automatic, [](const std::shared_ptr<Group>& world) {
    const auto sum = [](const std::shared_ptr<JaxChannel>& channel, const std::string& ranks,
                        int size, uint32_t position) {
      std::vector<int32_t> array(10'000, channel->world()->rank() + 1);
      const Buffer buffer = testing::buffer_of(array, DType::int32);
      JaxCall call;
      call.options.kind = Collective::all_reduce;
      call.ranks = ranks;
      call.size = size;
      call.position = position;
      call.operands.push_back({buffer, buffer});
      if (const auto error = channel->launch(std::move(call))->finish()) throw Error(*error);
      return array.back();
    };
    const bool in = world->rank() != 1;
    const auto ends = world->split(in ? 0 : -1, 0, patience());
    const auto channel = std::make_shared<JaxChannel>(world);
    if (in) channel->know({{"[0, 2]", ends}});
    uint32_t next = 0;
    CHECK_EQUAL(sum(channel, "", 3, next++), 6);
    if (in) {
      CHECK_EQUAL(sum(channel, "[0, 2]", 2, next++), 4);
    } else {
      CHECK_THROWS(sum(channel, "[0, 2]", 2, next), Error, contains(e.what(), "set [0, 2], which"));
    }
    CHECK_EQUAL(sum(channel, "", 3, next++), 6);
    if (in)  // which fails the set alone
      CHECK_THROWS(sum(channel, "[0, 2]", 2, next + 1), Error, contains(e.what(), "out of order"));
    channel->know({});
    CHECK_THROWS(sum(channel, "[0, 2]", 2, next), Error, contains(e.what(), "set [0, 2], which"));
    CHECK_EQUAL(sum(channel, "", 3, next++), 6);
  });
}

TEST(flights_of_packs_and_single_arrays_are_right_on_several_threads) {
  const int rounds = testing::kThreadSanitizer ? 3 : 10;
  for (const ProgressMode mode : {ProgressMode::thread, ProgressMode::caller})
    testing::run_groups(3, mode, [&](const std::shared_ptr<Group>& group) {
      JaxChannel channel(group);
      const auto named = Named::open(*group, {});  // its messages go by channels, as schedules do
      for (int round = 0; round < rounds; ++round) {
        std::vector<std::vector<int32_t>> arrays;
        for (const size_t count : {0U, 1U, 700U, 40'000U, 3U, 300'000U})
          arrays.emplace_back(count, group->rank() + 1);
        JaxCall call;
        call.options.kind = Collective::all_reduce;
        call.options.name = "round " + std::to_string(round);
        call.options.algorithm = round % 2 == 1 ? "binomial" : "";
        call.size = 3;
        call.position = static_cast<uint32_t>(round);
        for (auto& array : arrays) {
          const Buffer buffer = testing::buffer_of(array, DType::int32);
          call.operands.push_back({buffer, buffer});
        }
        const auto fused = channel.launch(std::move(call));
        ffi::Future landed;
        CompletionExecutor::all().send([&] {
          CHECK(!fused->finish());
          landed.complete("");
        });
        landed.wait();
        CHECK(fused->is_over());
        pass_barrier_by_name(*named);
        for (const auto& array : arrays)
          for (const int32_t x : array)
            if (x != 6) {
              testing::fail(__FILE__, __LINE__, "a wrong sum");
              break;
            }
      }
      named->flush(patience());
    });
}
