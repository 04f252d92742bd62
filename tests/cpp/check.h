// A test framework in one page: tests register themselves, checks count and print.
//
//   TEST(ring_keeps_the_order_of_bytes) {
//     CHECK(ring.empty());
//     CHECK_EQUAL(read, written);
//   }
#pragma once

#include <atomic>
#include <functional>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace testing {

/// Under a sanitizer everything takes several times as long, and ThreadSanitizer sees nothing in a
/// test of one thread: such tests do less there.
#if !defined(__has_feature)
#define __has_feature(feature) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
inline constexpr bool kSanitizer = true;
#else
inline constexpr bool kSanitizer = kThreadSanitizer;
#endif

struct Test {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(std::string name, std::function<void()> body) {
    tests().push_back({std::move(name), std::move(body)});
  }
};

/// Failed checks of the test that runs; any thread may add to it.
inline std::atomic<int> failures{0};

/// Context for failure messages, such as a seed or a table's case. Each thread has its own stack.
class Note {
 public:
  template <typename... Parts>
  explicit Note(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    notes().push_back(text.str());
  }
  ~Note() { notes().pop_back(); }
  Note(const Note&) = delete;
  Note& operator=(const Note&) = delete;

  static std::vector<std::string>& notes() {
    thread_local std::vector<std::string> all;
    return all;
  }
};

inline void fail(std::string_view file, int line, const std::string& what) {
  constexpr int kMostShown = 20;
  const int before = failures.fetch_add(1);
  if (before > kMostShown) return;
  std::ostringstream text;
  text << "    " << file.substr(file.rfind('/') + 1) << ":" << line << ": " << what;
  for (const std::string& note : Note::notes()) text << "\n      with " << note;
  text << "\n";
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  std::cout << text.str() << std::flush;
}

template <typename T>
std::string show(const T& value) {
  if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream text;
    text << value;
    return text.str();
  } else {
    return "a value";
  }
}

}  // namespace testing

#define TEST(name)                                                            \
  static void test_##name();                                                  \
  static const testing::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) testing::fail(__FILE__, __LINE__, "not " #condition); \
  } while (false)

#define CHECK_EQUAL(got, expected)                                                            \
  do {                                                                                        \
    const auto& check_got = (got);                                                            \
    const auto& check_expected = (expected);                                                  \
    if (!(check_got == check_expected))                                                       \
      testing::fail(                                                                          \
          __FILE__, __LINE__,                                                                 \
          #got " is " + testing::show(check_got) + ", not " + testing::show(check_expected)); \
  } while (false)

/// The condition may look at the caught exception `e`.
#define CHECK_THROWS(statement, Type, condition)                                           \
  do {                                                                                     \
    bool check_thrown = false;                                                             \
    try {                                                                                  \
      statement;                                                                           \
    } catch (const Type& e) {                                                              \
      check_thrown = true;                                                                 \
      if (!(condition))                                                                    \
        testing::fail(__FILE__, __LINE__, std::string("not " #condition ": ") + e.what()); \
    }                                                                                      \
    if (!check_thrown) testing::fail(__FILE__, __LINE__, #statement " throws no " #Type);  \
  } while (false)
